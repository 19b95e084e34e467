# SPDX-License-Identifier: Apache-2.0
"""The matrix of report.html: counts of verdicts by requirement, engine and scheduling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvconform.contract.loader import Spec
from kvconform.judge.aggregate import WORST_FIRST
from kvconform.judge.records import Row, Verdict

Counts = list[tuple[Verdict, int]]
"""Numbers by verdict, the worst verdict first, without zeros."""


def counted(verdicts: Iterable[Verdict]) -> Counts:
    """Return how often each verdict occurs."""
    tally = Counter(verdicts)
    return [(verdict, tally[verdict]) for verdict in WORST_FIRST if tally[verdict]]


@dataclass(frozen=True)
class Column:
    """An engine with one scheduling; `runs` is the number of runs."""

    title: str
    runs: int


@dataclass(frozen=True)
class Line:
    """A requirement's row in the matrix: in each cell, the number of runs by verdict.

    `unreached` are runs about it that did not reach their situation.
    """

    requirement: str
    level: str
    kind: str
    text: str
    cells: list[Counts]
    unreached: Sequence[str] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all cells: the requirement's status in the other reports."""
        worst = {counts[0][0] for counts in self.cells if counts}
        return min(worst, key=WORST_FIRST.index)


@dataclass(frozen=True)
class Area:
    """The matrix of one area."""

    name: str
    columns: list[Column]
    lines: list[Line]

    @property
    def counts(self) -> Counts:
        """Number of requirements by verdict."""
        return counted(line.verdict for line in self.lines)

    @property
    def failing(self) -> bool:
        """Whether a requirement of the area fails somewhere."""
        return any(line.verdict is Verdict.FAIL for line in self.lines)


def areas(
    rows: Sequence[Row], spec: Spec, unreached: Mapping[str, Sequence[str]] | None = None
) -> list[Area]:
    """Return the matrix of each area, sorted by name; `unreached` is as in Aggregate."""
    runs: dict[tuple[str, str], set[str]] = {}
    cells: dict[str, dict[tuple[str, str], list[Verdict]]] = {}
    levels: dict[str, tuple[str, str]] = {}
    for row in rows:
        place = (row.engine, row.scheduling)
        runs.setdefault(place, set()).add(row.run)
        cells.setdefault(row.requirement, {}).setdefault(place, []).append(row.verdict)
        levels[row.requirement] = (row.level, row.kind)
    columns = [Column(" ".join(place), len(runs[place])) for place in sorted(runs)]
    found: dict[str, Area] = {}
    for name in sorted(cells):
        requirement = spec.requirements.get(name)
        area = requirement.area if requirement else name.partition(".")[0]
        text = " ".join(requirement.text.split()) if requirement else ""
        own = [counted(cells[name].get(place, ())) for place in sorted(runs)]
        line = Line(name, *levels[name], text, own, (unreached or {}).get(name, ()))
        found.setdefault(area, Area(area, columns, [])).lines.append(line)
    return [found[name] for name in sorted(found)]
