# SPDX-License-Identifier: Apache-2.0
"""The kill matrix: which defect is found by which requirement, and which requirement finds none."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvconform import __version__
from kvconform.defect import Defect
from kvconform.requirement import Requirement

NAME = "kill-matrix"
FAILED = ("FAIL", "ERROR", "XPASS")


class Outcome(BaseModel):
    """What became of one defect. `failed` maps requirements to the runs that failed them, `found` to what the first of them said.

    `passed_by`: what those said that should have failed and did not, and how often. `problem` is empty if all is as listed.
    """

    model_config = ConfigDict(extra="forbid")

    defect: str
    failed: dict[str, list[str]] = {}
    found: dict[str, str] = {}
    passed_by: dict[str, dict[str, int]] = {}
    problem: str = ""
    seconds: float = 0.0

    def take(self, run: str, rows: Iterable[Mapping[str, Any]], wanted: Container[str] = ()) -> None:
        """Enter the failures among the rows of one run, and of the `wanted` requirements the other verdicts."""
        for row in rows:
            if row["requirement"] in wanted and row["verdict"] not in FAILED:
                verdicts = self.passed_by.setdefault(row["requirement"], {})
                verdicts[str(row["verdict"])] = verdicts.get(str(row["verdict"]), 0) + 1
            if row["verdict"] in FAILED:
                self.failed.setdefault(row["requirement"], []).append(run)
                self.found.setdefault(row["requirement"], row.get("message", ""))


class Kills(BaseModel):
    """One requirement: the defects that it was listed for and failed (`by`), and others that it failed besides (`also`)."""

    model_config = ConfigDict(extra="forbid")

    id: str
    kind: str
    level: str
    by: list[str] = []
    also: list[str] = []

    @property
    def must(self) -> bool:
        """Whether some defect has to violate it."""
        return self.level.startswith("MUST")


class KillMatrix(BaseModel):
    """kill-matrix.json. `complete`: all defects were examined, so that an empty row means something. `controls`: what the correct
    connectors failed that the defects are changes of."""

    model_config = ConfigDict(extra="forbid")

    suite: str = __version__
    complete: bool
    defects: list[Outcome]
    controls: list[Outcome] = []
    requirements: list[Kills]
    bugs: dict[str, list[str]] = Field(description="defects that are built after each real bug")

    @property
    def unkilled(self) -> list[str]:
        """MUST and MUST NOT requirements and guarantees that no defect violates, as far as examined; empty for a selection."""
        return [row.id for row in self.requirements if row.must and not row.by] if self.complete else []

    @property
    def bad(self) -> list[Outcome]:
        """Defects that were not found as listed."""
        return [outcome for outcome in self.defects if outcome.problem]


def build(
    outcomes: Sequence[Outcome],
    known: Mapping[str, Defect],
    requirements: Sequence[Requirement],
    controls: Sequence[Outcome] = (),
    *,
    complete: bool,
) -> KillMatrix:
    """The matrix of these outcomes over these requirements."""
    rows = [Kills(id=each.id, kind=each.kind, level=each.level) for each in requirements]
    for row in rows:
        found = [outcome.defect for outcome in outcomes if row.id in outcome.failed]
        row.by = [name for name in found if row.id in known[name].fails]
        row.also = [name for name in found if row.id not in known[name].fails]
    bugs: dict[str, list[str]] = {}
    for outcome in outcomes:
        for bug in known[outcome.defect].bugs:
            bugs.setdefault(bug, []).append(outcome.defect)
    bad = [outcome for outcome in controls if outcome.problem]
    return KillMatrix(complete=complete, defects=list(outcomes), controls=bad, requirements=rows, bugs=dict(sorted(bugs.items())))


def summary(matrix: KillMatrix) -> list[str]:
    """What a reader has to know, a sentence each."""
    lines = [f"{outcome.defect} {outcome.problem}" for outcome in matrix.controls]
    lines += [f"{outcome.defect}: {outcome.problem}" for outcome in matrix.bad]
    lines.append(f"{len(matrix.defects) - len(matrix.bad)} of {len(matrix.defects)} defects are caught as listed")
    if matrix.complete:
        for kind, name in (("requirement", "MUST requirements"), ("guarantee", "MUST guarantees")):
            rows = [row for row in matrix.requirements if row.must and row.kind == kind]
            missing = [row.id for row in rows if not row.by]
            lines.append(f"{name} killed: {len(rows) - len(missing)} of {len(rows)}" + "".join(f"\n  no defect: {i}" for i in missing))
    return lines


def print_matrix(matrix: KillMatrix) -> None:
    """requirement | level | killed by | also failed by; then the summary."""
    from rich.console import Console
    from rich.table import Table

    table = Table("requirement", "level", "killed by", "also failed by")
    for column in table.columns:
        column.overflow = "fold"  # an id cut short is of no use to anybody
    for row in matrix.requirements:
        if row.by or row.also or (matrix.complete and row.must):
            style = "red" if matrix.complete and row.must and not row.by else None
            table.add_row(row.id, row.level, ", ".join(row.by), ", ".join(row.also), style=style)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for line in summary(matrix):
        console.print(line, markup=False, highlight=False)


def markdown(matrix: KillMatrix) -> str:
    """The same as a page."""
    lines = ["# Kill matrix", "", *summary(matrix), "", "| requirement | level | killed by | also failed by |", "|---|---|---|---|"]
    lines += [f"| `{row.id}` | {row.level} | {_codes(row.by)} | {_codes(row.also)} |" for row in matrix.requirements]
    lines += ["", "| bug | defects |", "|---|---|", *(f"| {bug} | {_codes(names)} |" for bug, names in matrix.bugs.items())]
    lines += ["", "| defect | seconds | fails | problem |", "|---|---|---|---|"]
    lines += [f"| `{each.defect}` | {each.seconds} | {_codes(sorted(each.failed))} | {each.problem} |" for each in matrix.defects]
    return "\n".join(lines) + "\n"


def _codes(names: Sequence[str]) -> str:
    return " ".join(f"`{name}`" for name in names)


def write(matrix: KillMatrix, folder: Path) -> None:
    """kill-matrix.json and kill-matrix.md in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.json").write_text(matrix.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (folder / f"{NAME}.md").write_text(markdown(matrix), encoding="utf-8")
