# SPDX-License-Identifier: Apache-2.0
"""Verdicts of a run without findings, as one line of report.jsonl instead of one per requirement.

Nearly all verdicts of a run are PASS, or say that nothing was judged. A `RunLine` has them as
positions in the header's list of requirements; `rows_of` returns the rows again, unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kvconform.contract.case import Slow
from kvconform.judge.records import MUST, Row, Verdict

SILENT = (Verdict.NOT_EXERCISED, Verdict.UNSUPPORTED, Verdict.UNOBSERVABLE)
"""Verdicts of rows in which nothing was judged."""

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
    strict = any(row.gating and row.level not in MUST for row in rows) or any(
        row.gating and row.beyond for row in rows
    )
    for row in rows:
        number, kind, level = position.get(row.requirement, (-1, "", ""))
        if line is None:
            line = _empty(row, strict=strict)
        compact = row.verdict in (Verdict.PASS, *SILENT)
        if not compact or row != _row(line, (row.requirement, kind, level), row.verdict, row):
            rest.append(row)
        elif row.verdict is Verdict.PASS:
            passed.append((number, row.exercised))
        else:
            silent.setdefault((row.verdict, row.message), []).append(number)
    if line is None or not (passed or silent):
        return None, rest
    listed = [(verdict, message, numbers) for (verdict, message), numbers in silent.items()]
    return line.model_copy(update={"passed": passed, "silent": listed}), rest


def _empty(row: Row, *, strict: bool) -> RunLine:
    return RunLine(
        case=row.case,
        engine=row.engine,
        scheduling=row.scheduling,
        runner=row.runner,
        depth=row.depth,
        block_size=row.block_size,
        slow=row.slow,
        beyond=row.beyond,
        strict=strict,
    )


def _row(line: RunLine, requirement: Judged, verdict: Verdict, like: Row | None = None) -> Row:
    """Return a row of a line; `like` has what the line says about this requirement alone."""
    name, kind, level = requirement
    counts = line.strict or (level in MUST and not line.beyond)
    return Row(
        requirement=name,
        case=line.case,
        engine=line.engine,
        scheduling=line.scheduling,
        runner=line.runner,
        depth=line.depth,
        block_size=line.block_size,
        verdict=verdict,
        slow=line.slow,
        kind="guarantee" if kind == "guarantee" else "requirement",
        level=level,
        gating=kind == "requirement" and counts,
        beyond=line.beyond,
        exercised=like.exercised if like is not None and verdict is Verdict.PASS else 0,
        message=like.message if like is not None and verdict is not Verdict.PASS else None,
    )


def rows_of(line: RunLine, judged: Sequence[Judged]) -> Iterable[Row]:
    """Yield the rows of a line. IndexError if it does not belong to this list of requirements."""
    for number, exercised in line.passed:
        row = _row(line, judged[number], Verdict.PASS)
        row.exercised = exercised
        yield row
    for verdict, message, numbers in line.silent:
        for number in numbers:
            row = _row(line, judged[number], verdict)
            row.message = message
            yield row
