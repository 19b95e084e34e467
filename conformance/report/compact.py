# SPDX-License-Identifier: Apache-2.0
"""Verdicts of a run without findings, as one line of report.jsonl instead of one per requirement.

Nearly all verdicts of a run are PASS, or say that nothing was judged. A `RunLine` has them as
positions in the header's list of requirements; `rows_of` returns the rows again, unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvconform.contract.case import Slow
from kvconform.judge.records import MUST, Row, Verdict

SILENT = (Verdict.NOT_EXERCISED, Verdict.UNSUPPORTED, Verdict.UNOBSERVABLE)
"""Verdicts of rows in which nothing was judged."""

OF_RUN = ("case", "engine", "scheduling", "runner", "depth", "block_size", "slow", "beyond")
"""Fields that all rows of a run share."""
_OWN = {Verdict.PASS: "exercised", **dict.fromkeys(SILENT, "message")}
"""The field that a line keeps for each requirement, by verdict; other verdicts are findings."""

Judged = tuple[str, str, str]
"""Id, kind and level of a requirement."""


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
    position = {name: (number, kind, level) for number, (name, kind, level) in enumerate(judged)}
    line: RunLine | None = None
    passed: list[tuple[int, int]] = []
    silent: dict[tuple[Verdict, str | None], list[int]] = {}
    rest: list[Row] = []
    strict = any(row.gating and (row.level not in MUST or row.beyond) for row in rows)
    for row in rows:
        number, kind, level = position.get(row.requirement, (-1, "", ""))
        if line is None:
            line = RunLine(strict=strict, **{name: getattr(row, name) for name in OF_RUN})
        own = {_OWN[row.verdict]: getattr(row, _OWN[row.verdict])} if row.verdict in _OWN else {}
        if not own or row != _row(line, (row.requirement, kind, level), row.verdict, **own):
            rest.append(row)
        elif row.verdict is Verdict.PASS:
            passed.append((number, row.exercised))
        else:
            silent.setdefault((row.verdict, row.message), []).append(number)
    if line is None or not (passed or silent):
        return None, rest
    listed = [(verdict, message, numbers) for (verdict, message), numbers in silent.items()]
    return line.model_copy(update={"passed": passed, "silent": listed}), rest


def _row(line: RunLine, requirement: Judged, verdict: Verdict, **own: Any) -> Row:
    """Return a row of a line; `own` is what the line says about this requirement alone."""
    name, kind, level = requirement
    counts = line.strict or (level in MUST and not line.beyond)
    return Row(
        requirement=name,
        verdict=verdict,
        kind="guarantee" if kind == "guarantee" else "requirement",
        level=level,
        gating=kind == "requirement" and counts,
        **{name: getattr(line, name) for name in OF_RUN},
        **own,
    )


def rows_of(line: RunLine, judged: Sequence[Judged]) -> Iterable[Row]:
    """Yield the rows of a line. IndexError if it does not belong to this list of requirements."""
    for number, exercised in line.passed:
        yield _row(line, judged[number], Verdict.PASS, exercised=exercised)
    for verdict, message, numbers in line.silent:
        for number in numbers:
            yield _row(line, judged[number], verdict, message=message)
