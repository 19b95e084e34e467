# SPDX-License-Identifier: Apache-2.0
"""Planted defects (spec/defects.yaml), and the kill matrix: which requirement finds which defect.

A defect is a known-bad connector, or a fault of the engine under a correct connector.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvconform import __version__
from kvconform.contract.case import SLOW, Case, Engine, Scheduling, Variant
from kvconform.contract.loader import Spec
from kvconform.contract.profile import runs_in, select
from kvconform.contract.requirement import Id, Model, Requirement
from kvconform.contract.scenario import Scenario
from kvconform.errors import Location, UsageError
from kvconform.judge.records import Row
from kvconform.process.server import ServerSpec
from kvconform.process.watchdog import DEFAULT_LIMIT
from kvconform.refimpl.faulty import Fault
from kvconform.words import many

GATE = "core"
"""The profile that must find every defect that its cases can find."""
REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
Symbol = Annotated[str, Field(pattern=r"^[\w.]+:\w+$", description="package.module:name")]


class Defect(Model):
    """An entry of spec/defects.yaml.

    Run on `cases`, it must fail exactly the requirements `fails`; those in `may` can fail too. With
    `engine_fault` the connector is correct, and `fails` names guarantees or consequences: what the
    engine breaks is not the connector's failure.
    """

    id: Id
    text: str = Field(min_length=1, description="what is wrong with it, in one line")
    connector: Symbol = REFERENCE
    engine_fault: Symbol | None = Field(
        default=None, description="a Fault, active while the cases run"
    )
    extra_config: dict[str, Any] = {}
    extra_config_after_restart: dict[str, Any] = {}
    capabilities: dict[str, Any] = {}
    router: Symbol | None = Field(
        default=None, description="class that makes the parameters of hand-overs"
    )
    servers: list[ServerSpec] = Field(
        default=[], description="servers that it needs; extra_config may name their ports"
    )
    bugs: list[Annotated[str, Field(pattern=r"^B\d{3}$")]] = Field(
        default=[], description="real bugs of this kind"
    )
    engines: list[Engine] = Field(default=["reference"], min_length=1)
    scheduling: list[Scheduling] | None = Field(
        default=None, min_length=1, description="run the cases only with these"
    )
    emulate_cuda: bool = Field(default=False, description="run on an emulated CUDA device")
    own_process: bool = Field(default=False, description="it may end its process")
    hook_timeout: float = Field(
        default=DEFAULT_LIMIT, gt=0, description="seconds that a hook may take"
    )
    cases: list[Id] = Field(min_length=1)
    fails: list[Id] = Field(min_length=1)
    may: list[Id] = []

    @model_validator(mode="after")
    def _something_is_wrong(self) -> Defect:
        if self.connector == REFERENCE and self.engine_fault is None:
            raise ValueError(
                "names neither a connector nor an engine_fault: nothing would be wrong"
            )
        for names in (self.cases, self.fails, self.may, self.bugs):
            if len(set(names)) < len(names):
                raise ValueError("names something twice")
        if both := set(self.fails) & set(self.may):
            raise ValueError(f"{min(both)} is in `fails` and in `may`")
        return self

    @property
    def live(self) -> bool:
        """Whether it needs the complete vLLM, and with that a minute."""
        return self.engines == ["live"]

    def fault(self) -> Fault | None:
        """Import the engine's fault, if it has one. UsageError if there is none of that name."""
        if self.engine_fault is None:
            return None
        module, name = self.engine_fault.split(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"defect {self.id}: {error}") from None
        if not isinstance(found, Fault):
            raise UsageError(f"defect {self.id}: {self.engine_fault} is no Fault")
        return found

    def variants(self, spec: Spec) -> Iterator[Variant]:
        """Yield the runs of its cases on its engines; of the gate's cases only those that it makes.

        So a defect that the gate cannot find is not caught.
        """
        slow = SLOW if self.emulate_cuda else None
        cases = [spec.cases[case] for case in self.cases if case in spec.cases]
        _, in_gate = select(spec.profiles, GATE, (), cases)
        for case in self.cases:
            for variant in driven(spec, case).variants(self.engines, self.scheduling, slow):
                if case not in in_gate or runs_in(spec.profiles, GATE, variant):
                    yield variant


def driven(spec: Spec, name: str) -> Case | Scenario:
    """Return the case of this id, or the scenario of engine live."""
    return spec.cases[name] if name in spec.cases else spec.scenarios[name]


def load_defects(spec: Spec) -> dict[str, Defect]:
    """Return the entries of spec/defects.yaml by id.

    UsageError for an entry that is malformed, names something that does not exist, or has no runs.
    """
    found = {}
    for name, raw in spec.defects.items():
        where = spec.places.get(f"defect:{name}", Location(name))
        try:
            defect = found[name] = Defect(**raw)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(map(str, first["loc"]))
            sentence = f"{path}: {first['msg']}" if path else first["msg"]
            raise UsageError(f"{where}: defect {name}: {sentence}") from None
        if problem := _problem(defect, spec):
            raise UsageError(f"{where}: defect {name} {problem}")
    return found


def _problem(defect: Defect, spec: Spec) -> str | None:
    for case in defect.cases:
        if case not in spec.cases and case not in spec.scenarios:
            return f"names {case}, which does not exist"
    for requirement in (*defect.fails, *defect.may):
        if requirement not in spec.requirements:
            return f"names {requirement}, which does not exist"
    if next(defect.variants(spec), None) is None:
        return f"has no run: in profile {GATE}, none of its cases runs on its engines"
    fails = [spec.requirements[name] for name in defect.fails]
    blamed = [
        requirement.id
        for requirement in fails
        if requirement.kind != "guarantee" and not requirement.consequence
    ]
    if blamed and defect.engine_fault is not None:
        return f"is an engine fault, but {blamed[0]} is neither a guarantee nor a consequence"
    return None


NAME = "kill-matrix"
FAILED = ("FAIL", "ERROR", "XPASS")


class Runs(BaseModel):
    """Runs in which a requirement had one verdict; `why` is the first one's reason, if it has any.

    `exercised` says how often the requirement was exercised in all of them.
    """

    model_config = ConfigDict(extra="forbid")

    runs: list[str] = []
    exercised: int = 0
    why: str = ""


class Outcome(BaseModel):
    """Outcome of one planted defect, or of control runs.

    `failed` maps requirements to the runs that failed them, `found` maps them to the message of the
    first. `passed_by` maps requirements that should have failed and did not to the runs of each
    verdict. `problem` says what is not as listed; it is empty if nothing is.
    """

    model_config = ConfigDict(extra="forbid")

    defect: str
    failed: dict[str, list[str]] = {}
    found: dict[str, str] = {}
    passed_by: dict[str, dict[str, Runs]] = {}
    problem: str = ""
    seconds: float = 0.0

    def take(self, run: str, rows: Iterable[Row], wanted: Container[str] = ()) -> None:
        """Record the failures of one run, and the other verdicts of the `wanted` requirements."""
        for row in rows:
            if row.requirement in wanted and row.verdict not in FAILED:
                verdicts = self.passed_by.setdefault(row.requirement, {})
                alike = verdicts.setdefault(str(row.verdict), Runs(why=row.message or ""))
                alike.runs.append(run)
                alike.exercised += row.exercised
            if row.verdict in FAILED:
                self.failed.setdefault(row.requirement, []).append(run)
                self.found.setdefault(row.requirement, row.finding)


class Kills(BaseModel):
    """Defects that one requirement finds: those that list it (`by`), and others (`also`)."""

    model_config = ConfigDict(extra="forbid")

    id: str
    kind: str
    level: str
    by: list[str] = []
    also: list[str] = []

    @property
    def must(self) -> bool:
        """Whether at least one defect has to violate it."""
        return self.level.startswith("MUST")


class KillMatrix(BaseModel):
    """The kill matrix, as in kill-matrix.json.

    `complete`: all defects were examined, so an empty row means that no defect violates the
    requirement. `controls` are control runs that failed: of the correct connectors that the defects
    are derived from.
    """

    model_config = ConfigDict(extra="forbid")

    suite: str = __version__
    complete: bool
    defects: list[Outcome]
    controls: list[Outcome] = []
    requirements: list[Kills]
    bugs: dict[str, list[str]] = Field(description="defects modelled on each real bug")

    @property
    def unkilled(self) -> list[str]:
        """MUST (NOT) requirements and guarantees that no defect violates; empty for a selection."""
        if not self.complete:
            return []
        return [row.id for row in self.requirements if row.must and not row.by]

    @property
    def bad(self) -> list[Outcome]:
        """Defects that were not caught as listed."""
        return [outcome for outcome in self.defects if outcome.problem]


def build(
    outcomes: Sequence[Outcome],
    known: Mapping[str, Defect],
    requirements: Sequence[Requirement],
    controls: Sequence[Outcome] = (),
    *,
    complete: bool,
) -> KillMatrix:
    """Return the matrix of these outcomes over these requirements."""
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
    return KillMatrix(
        complete=complete,
        defects=list(outcomes),
        controls=bad,
        requirements=rows,
        bugs=dict(sorted(bugs.items())),
    )


def summary(matrix: KillMatrix) -> list[str]:
    """Return what a reader has to know, in sentences."""
    lines = [f"{outcome.defect} {outcome.problem}" for outcome in matrix.controls]
    for outcome in matrix.bad:
        lines.append(f"{outcome.defect}: {outcome.problem}")
        lines += [f"  {line}" for line in details(outcome)]
    total = len(matrix.defects)
    verdict = f"{total - len(matrix.bad)} of {total} defects are caught as listed"
    otherwise = sum(bool(outcome.failed) for outcome in matrix.bad)
    lines.append(f"{verdict}; {otherwise} otherwise" if otherwise else verdict)
    if matrix.complete:
        for kind in ("requirement", "guarantee"):
            rows = [row for row in matrix.requirements if row.must and row.kind == kind]
            missing = [row.id for row in rows if not row.by]
            lines.append(f"MUST {kind}s killed: {len(rows) - len(missing)} of {len(rows)}")
            lines += [f"  no defect: {name}" for name in missing]
    return lines


def details(outcome: Outcome) -> list[str]:
    """Return why a defect was not caught as listed: what was exercised and held, and what failed.

    Each requirement that should have failed has a line per verdict, and each that failed has one.
    """
    lines = []
    for name, verdicts in outcome.passed_by.items():
        for verdict, alike in verdicts.items():
            where = f"{many(len(alike.runs), 'run')}, first {alike.runs[0]}"
            if verdict == "PASS":
                times = many(alike.exercised, "time")
                lines.append(f"{name} was exercised {times} and held in {where}")
            else:
                why = f": {alike.why}" if alike.why else ""
                lines.append(f"{name} was {verdict} in {where}{why}")
    for name, runs in outcome.failed.items():
        message = outcome.found.get(name, "")
        lines.append(f"{name} failed in {many(len(runs), 'run')}, first {runs[0]}: {message}")
    return lines if outcome.failed else [*lines, "no requirement failed"]


def print_matrix(matrix: KillMatrix) -> None:
    """Print the matrix as a table, and the summary."""
    from rich.console import Console
    from rich.table import Table

    table = Table("requirement", "level", "killed by", "also failed by")
    for column in table.columns:
        column.overflow = "fold"  # never cut an id short
    for row in matrix.requirements:
        if row.by or row.also or (matrix.complete and row.must):
            style = "red" if matrix.complete and row.must and not row.by else None
            table.add_row(row.id, row.level, ", ".join(row.by), ", ".join(row.also), style=style)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for line in summary(matrix):
        console.print(line, markup=False, highlight=False)


def markdown(matrix: KillMatrix) -> str:
    """Return matrix and summary as a Markdown page, with the bugs and the defects."""
    lines = [
        "# Kill matrix",
        "",
        *summary(matrix),
        "",
        "| requirement | level | killed by | also failed by |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{row.id}` | {row.level} | {_codes(row.by)} | {_codes(row.also)} |"
        for row in matrix.requirements
    ]
    lines += [
        "",
        "| bug | defects |",
        "|---|---|",
        *(f"| {bug} | {_codes(names)} |" for bug, names in matrix.bugs.items()),
    ]
    lines += ["", "| defect | seconds | fails | problem |", "|---|---|---|---|"]
    lines += [
        f"| `{each.defect}` | {each.seconds} | {_codes(sorted(each.failed))} | {each.problem} |"
        for each in matrix.defects
    ]
    return "\n".join(lines) + "\n"


def _codes(names: Sequence[str]) -> str:
    return " ".join(f"`{name}`" for name in names)


def write(matrix: KillMatrix, folder: Path) -> None:
    """Write kill-matrix.json and kill-matrix.md into `folder`, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.json").write_text(matrix.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (folder / f"{NAME}.md").write_text(markdown(matrix), encoding="utf-8")
