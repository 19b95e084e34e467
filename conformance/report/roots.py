# SPDX-License-Identifier: Apache-2.0
"""Root causes: which failures of a connector other failures of the same runs explain.

A failure is a consequence if others, of earlier stages, failed in each of its runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter

from kvconform.judge.records import Row, Verdict
from kvconform.report.causes import by_cause
from kvconform.report.stage import Stage, stage


class Weight(IntEnum):
    """What a root cause weighs: the heaviest come first, and the first is shown at length."""

    COUNTS = 0
    ENGINE = 1
    RISK = 2
    ADVICE = 3


@dataclass
class Root:
    """A failure that no other one explains.

    `group` are its rows, `consequences` the groups of rows that it explains, and `blocked` the
    requirements that were not judged because of any of these.
    """

    group: list[Row]
    consequences: list[list[Row]] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)

    @property
    def row(self) -> Row:
        """The first row: the one that is shown."""
        return self.group[0]

    @property
    def counts(self) -> bool:
        """Whether this or a consequence of it counts against the connector."""
        return any(group[0].gating for group in (self.group, *self.consequences))

    @property
    def weight(self) -> Weight:
        """Whether it counts; if it does not, what it is instead."""
        if self.counts:
            return Weight.COUNTS
        if self.row.kind == "guarantee":
            return Weight.ENGINE
        return Weight.RISK if self.row.risk else Weight.ADVICE

    @property
    def number(self) -> int:
        """How many requirements fail or were not judged because of this."""
        return len({group[0].requirement for group in self.consequences} | set(self.blocked))


def roots(rows: Sequence[Row]) -> list[Root]:
    """Return the root causes of all failures, those that explain others first.

    Those that do not count against the connector come last: guarantees of the engine, then risks,
    then recommendations.
    """
    groups = by_cause([row for row in rows if row.verdict is Verdict.FAIL])
    found: list[Root] = []
    home: dict[tuple[str, str], Root] = {}
    for group in groups:
        root = _explained_by(group, found)
        if root is None:
            root = Root(group)
            found.append(root)
        else:
            root.consequences.append(group)
        for row in group:
            home.setdefault((row.requirement, row.run), root)
    failing = {group[0].requirement for group in groups}
    for row in rows:
        if row.verdict is not Verdict.BLOCKED or row.requirement in failing:
            continue
        because = home.get((row.blocked_by or "", row.run))
        if because is not None and row.requirement not in because.blocked:
            because.blocked.append(row.requirement)
    return sorted(found, key=attrgetter("weight"))


def _explained_by(group: Sequence[Row], known: Sequence[Root]) -> Root | None:
    """Return the root cause that explains a group: together, the known ones fail in all its runs.

    Of several, the one with most of the runs is returned.
    """
    runs = {row.run for row in group}
    candidates = [(root, runs & _explains(root, group)) for root in known]
    if runs - set().union(*(common for _, common in candidates)):
        return None
    return max(candidates, key=lambda pair: len(pair[1]))[0]


def _explains(root: Root, group: Sequence[Row]) -> set[str]:
    """Return the runs in which a root cause can explain a group."""
    first = root.row
    if first.requirement == group[0].requirement or not _may_hide(first, group[0]):
        return set()
    here = stage(first)
    there = stage(group[0])
    if here in (Stage.ANNOUNCED, Stage.TOKENS, Stage.END, Stage.FORM) or there is Stage.FORM:
        return set()
    if here >= there:
        return set()
    when = {row.run: row.event for row in root.group}
    # A wrong save may show after a wrong load; all else is caused by what came before it.
    in_time = here in (Stage.SAVE, Stage.LOAD)
    return {
        row.run
        for row in group
        if row.run in when and (in_time or _before(when[row.run], row.event))
    }


def _before(one: int | None, other: int | None) -> bool:
    return one is None or other is None or one <= other


def _may_hide(root: Row, other: Row) -> bool:
    """Return whether a failure may be shown below another: never one that counts below advice."""
    if root.kind == "guarantee":
        return True
    return other.kind == "requirement" and (root.gating or not other.gating)
