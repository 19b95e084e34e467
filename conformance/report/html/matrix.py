# SPDX-License-Identifier: Apache-2.0
"""The matrix of a report: requirement by engine and scheduling, with counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvconform.contract.loader import Spec
from kvconform.judge.verdict import Row, Verdict

ORDER = (
    Verdict.FAIL,
    Verdict.ERROR,
    Verdict.XPASS,
    Verdict.BLOCKED,
    Verdict.XFAIL,
    Verdict.PASS,
    Verdict.DISABLED,
    Verdict.NOT_EXERCISED,
    Verdict.UNSUPPORTED,
    Verdict.UNOBSERVABLE,
)
"""The first of these that occurs is what a cell says."""


@dataclass
class Cell:
    """One requirement on one engine with one scheduling."""

    counts: Counter[str] = field(default_factory=Counter)

    @property
    def verdict(self) -> str:
        """The one that matters most."""
        return next((str(one) for one in ORDER if self.counts[str(one)]), "")

    @property
    def words(self) -> str:
        """`3 fail of 12` and the like."""
        total = sum(self.counts.values())
        if not total:
            return ""
        number = self.counts[self.verdict]
        return f"{number} {self.verdict.lower().replace('_', ' ')}" + (
            f" of {total}" if number != total else ""
        )


@dataclass
class Line:
    """A requirement's row in the matrix."""

    requirement: str
    level: str
    kind: str
    text: str
    cells: list[Cell]

    @property
    def verdict(self) -> str:
        return min(
            (cell.verdict for cell in self.cells if cell.verdict),
            key=lambda one: ORDER.index(Verdict(one)),
            default="",
        )


@dataclass
class Area:
    """The requirements of an area. `columns`: engine and scheduling of each cell."""

    name: str
    columns: list[str]
    lines: list[Line]

    @property
    def failing(self) -> int:
        return sum(line.verdict == "FAIL" for line in self.lines)

    @property
    def passing(self) -> int:
        return sum(line.verdict == "PASS" for line in self.lines)


def areas(rows: Sequence[Row], spec: Spec) -> list[Area]:
    """The matrix, by area."""
    columns = sorted({(row.engine, row.scheduling) for row in rows})
    cells: dict[str, dict[tuple[str, str], Cell]] = {}
    levels: dict[str, tuple[str, str]] = {}
    for row in rows:
        cells.setdefault(row.requirement, {}).setdefault(
            (row.engine, row.scheduling), Cell()
        ).counts[str(row.verdict)] += 1
        levels[row.requirement] = (row.level, row.kind)
    found: dict[str, Area] = {}
    for name in sorted(cells):
        requirement = spec.requirements.get(name)
        area = requirement.area if requirement else name.partition(".")[0]
        text = " ".join(requirement.text.split()) if requirement else ""
        line = Line(
            name, *levels[name], text, [cells[name].get(column, Cell()) for column in columns]
        )
        found.setdefault(
            area, Area(area, [" ".join(column) for column in columns], [])
        ).lines.append(line)
    return [found[name] for name in sorted(found)]
