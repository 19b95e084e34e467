# SPDX-License-Identifier: Apache-2.0
"""The matrix of report.html: counts of verdicts by requirement, engine and scheduling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvconform.contract.loader import Spec
from kvconform.judge.records import Row, Verdict

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
"""Verdicts by importance: a cell shows the first one that occurs."""


@dataclass
class Cell:
    """Counts of verdicts of one requirement on one engine with one scheduling."""

    counts: Counter[str] = field(default_factory=Counter)

    @property
    def verdict(self) -> str:
        """The most important verdict; empty if there is none."""
        return next((str(one) for one in ORDER if self.counts[str(one)]), "")

    @property
    def words(self) -> str:
        """Text of the cell, such as `3 fail of 12`."""
        total = sum(self.counts.values())
        if not total:
            return ""
        number = self.counts[self.verdict]
        text = f"{number} {self.verdict.lower().replace('_', ' ')}"
        return text if number == total else f"{text} of {total}"


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
        """The most important verdict of all cells."""
        return min(
            (cell.verdict for cell in self.cells if cell.verdict),
            key=lambda one: ORDER.index(Verdict(one)),
            default="",
        )


@dataclass
class Area:
    """The matrix of one area. `columns` name engine and scheduling of each cell."""

    name: str
    columns: list[str]
    lines: list[Line]

    @property
    def failing(self) -> int:
        """Number of requirements that fail somewhere."""
        return sum(line.verdict == "FAIL" for line in self.lines)

    @property
    def passing(self) -> int:
        """Number of requirements whose most important verdict is PASS."""
        return sum(line.verdict == "PASS" for line in self.lines)


def areas(rows: Sequence[Row], spec: Spec) -> list[Area]:
    """Return the matrix of each area, sorted by name."""
    columns = sorted({(row.engine, row.scheduling) for row in rows})
    titles = [" ".join(column) for column in columns]
    cells: dict[str, dict[tuple[str, str], Cell]] = {}
    levels: dict[str, tuple[str, str]] = {}
    for row in rows:
        own = cells.setdefault(row.requirement, {})
        own.setdefault((row.engine, row.scheduling), Cell()).counts[str(row.verdict)] += 1
        levels[row.requirement] = (row.level, row.kind)
    found: dict[str, Area] = {}
    for name in sorted(cells):
        requirement = spec.requirements.get(name)
        area = requirement.area if requirement else name.partition(".")[0]
        text = " ".join(requirement.text.split()) if requirement else ""
        own = cells[name]
        line = Line(name, *levels[name], text, [own.get(column, Cell()) for column in columns])
        found.setdefault(area, Area(area, titles, [])).lines.append(line)
    return [found[name] for name in sorted(found)]
