# SPDX-License-Identifier: Apache-2.0
"""Verdicts of a run without findings, as one line of report.jsonl instead of one per requirement.

Nearly all verdicts of a run are PASS, or say that nothing was judged. A `RunLine` has them as
positions in the header's list of requirements; `rows_of` returns the rows again, unchanged.

Workers send their reports in this form, too (`compacted`). Of the reference connector, the reports
have a fifteenth of the bytes, and cost worker and controller 60 % of the processor time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvconform.contract.case import Slow
from kvconform.contract.requirement import Requirement
from kvconform.judge.records import MUST, CaseReport, Row, Verdict

SILENT = (Verdict.NOT_EXERCISED, Verdict.UNSUPPORTED, Verdict.UNOBSERVABLE)
"""Verdicts of rows in which nothing was judged."""

OF_RUN = ("case", "engine", "scheduling", "runner", "depth", "block_size", "slow", "beyond")
"""Fields that all rows of a run share."""
PLAIN = (Verdict.PASS, *SILENT)
"""Verdicts of rows without findings: a line keeps `exercised` of the first, else `message`."""

Judged = tuple[str, str, str]
"""Id, kind and level of a requirement."""


def judged_of(known: Mapping[str, Requirement], names: Iterable[str]) -> list[Judged]:
    """Return id, kind and level of each of these requirements."""
    return [(name, known[name].kind, known[name].level) for name in names]


class RunLine(BaseModel):
    """The verdicts of one run that come without findings."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    type: Literal["run"] = "run"
    case: str
    engine: str
    scheduling: str
    runner: str
    depth: int
    block_size: int
    slow: Slow | None = None
    beyond: tuple[str, ...] = ()
    strict: bool = False
    passed: list[tuple[int, int]] = Field(
        default=[], description="PASS: position in the header's `judged`, times exercised"
    )
    silent: list[tuple[Verdict, str | None, list[int]]] = Field(
        default=[], description="nothing judged: verdict, message, positions in `judged`"
    )


def line_for(rows: Sequence[Row], judged: Sequence[Judged]) -> tuple[RunLine | None, list[Row]]:
    """Return the line for the rows of one run, and the rows that need lines of their own."""
    if not rows:
        return None, []
    position = {
        name: (number, (name, kind, level)) for number, (name, kind, level) in enumerate(judged)
    }
    strict = any(row.gating and (row.level not in MUST or row.beyond) for row in rows)
    line = RunLine(strict=strict, **{name: getattr(rows[0], name) for name in OF_RUN})
    # One row for all comparisons: there are hundreds for each run, and a new one takes longer.
    plain = _Plain(line)
    passed: list[tuple[int, int]] = []
    silent: dict[tuple[Verdict, str | None], list[int]] = {}
    rest: list[Row] = []
    for row in rows:
        number, requirement = position.get(row.requirement, (-1, (row.requirement, "", "")))
        passes = row.verdict is Verdict.PASS
        own: dict[str, Any] = {"exercised": row.exercised} if passes else {"message": row.message}
        if row.verdict not in PLAIN or row != plain.row(requirement, row.verdict, **own):
            rest.append(row)
        elif passes:
            passed.append((number, row.exercised))
        else:
            silent.setdefault((row.verdict, row.message), []).append(number)
    if not (passed or silent):
        return None, rest
    listed = [(verdict, message, numbers) for (verdict, message), numbers in silent.items()]
    return line.model_copy(update={"passed": passed, "silent": listed}), rest


class _Plain:
    """Rows without findings of the run of a line."""

    def __init__(self, line: RunLine) -> None:
        self._strict = line.strict
        self._lenient = bool(line.beyond)
        self._of_run = {name: getattr(line, name) for name in OF_RUN}
        self._row = Row(requirement="", verdict=Verdict.PASS, **self._of_run)

    def row(
        self,
        requirement: Judged,
        verdict: Verdict,
        *,
        exercised: int = 0,
        message: str | None = None,
    ) -> Row:
        """Return the row of a requirement, with what the line says about it alone.

        It is the same object each time, and holds until the next call.
        """
        for name, value in self._said(requirement, verdict, exercised, message).items():
            setattr(self._row, name, value)
        return self._row

    def new_row(
        self,
        requirement: Judged,
        verdict: Verdict,
        *,
        exercised: int = 0,
        message: str | None = None,
    ) -> Row:
        """Return what `row` does, as a new object."""
        return Row(**self._of_run, **self._said(requirement, verdict, exercised, message))

    def _said(
        self, requirement: Judged, verdict: Verdict, exercised: int, message: str | None
    ) -> dict[str, Any]:
        """Return the fields that differ from row to row."""
        name, kind, level = requirement
        counts = kind == "requirement" and (self._strict or (level in MUST and not self._lenient))
        return {
            "requirement": name,
            "verdict": verdict,
            "kind": "guarantee" if kind == "guarantee" else "requirement",
            "level": level,
            "gating": counts,
            "exercised": exercised,
            "message": message,
        }


def rows_of(line: RunLine, judged: Sequence[Judged]) -> Iterable[Row]:
    """Yield the rows of a line. IndexError if it does not belong to this list of requirements."""
    plain = _Plain(line)
    for number, exercised in line.passed:
        yield plain.new_row(judged[number], Verdict.PASS, exercised=exercised)
    for verdict, message, numbers in line.silent:
        for number in numbers:
            yield plain.new_row(judged[number], verdict, message=message)


def compacted(report: CaseReport, judged: Sequence[Judged]) -> dict[str, Any]:
    """Return a report as JSON data for `restored`. `judged`: the requirements that were judged."""
    line, rest = line_for(report.rows, judged)
    return {
        "report": report.to_dict(exclude={"rows"}),
        "line": None if line is None else line.model_dump(mode="json", exclude_defaults=True),
        "rows": [row.to_dict() for row in rest],
    }


def restored(data: Mapping[str, Any], judged: Sequence[Judged]) -> CaseReport:
    """Return the report that `compacted` made into data, with the rows without findings first.

    Raises ValidationError for other data.
    """
    report = CaseReport.from_dict(data["report"])
    if data["line"] is not None:
        report.rows += rows_of(RunLine.model_validate(data["line"]), judged)
    report.rows += map(Row.from_dict, data["rows"])
    return report
