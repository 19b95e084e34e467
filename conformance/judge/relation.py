# SPDX-License-Identifier: Apache-2.0
"""`relate`: a property of two runs of one case, for example that with and without connector the same tokens come out.

The matching events of each run are projected to values, grouped by `per` (one group if absent), and the groups must be equal in order
(`ordered: false`: as bags). With `prefix`, a group that merely stops earlier is equal too: an abort may land at another token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvconform.contract.requirement import Requirement
from kvconform.judge.describe import describe
from kvconform.judge.guards import hashable
from kvconform.judge.monitor import Event, Monitor

RUNS = {
    "no-connector": "without a connector",
    "pickled-metadata": "with metadata that was pickled on its way",
    "second-process": "in a process of its own over the same store",
    "hash-seed": "with another hash seed",
    "alone": "without the MultiConnector around it",
}
"""What is different in the second of two runs."""

Side = tuple[Any, Event]
"""The value that an event was projected to, and the event."""
Groups = dict[Any, list[Side]]


class RelateMonitor(Monitor):
    """The outcome of a `relate`, in the shape of a monitor: `violations` hold the first difference per group."""

    def handlers(self) -> dict[str, Any]:
        return {}

    def compare(self, traces: Sequence[Sequence[Event]], names: Sequence[str]) -> None:
        """Compare the two traces."""
        try:
            first, second = (self.groups(trace) for trace in traces)
        except Exception as error:  # as in a monitor: a defect of the specification
            self.error = (
                f"the check of {self.requirement.id} failed: {type(error).__name__} {error}"
            )
            return
        self.exercised = sum(len(group) for group in first.values()) + sum(
            len(group) for group in second.values()
        )
        end: Event = traces[0][-1] if traces[0] else {"kind": "run.end", "seq": 0, "step": 0}
        differences = [
            (one[1] if one is not None else end, key, index, one, two)
            for key in dict.fromkeys(
                [*first, *second]
            )  # in the traces' order: of a set's, it would depend on the process
            if (found := self.difference(first.get(key, []), second.get(key, []))) is not None
            for index, one, two in [found]
        ]
        for about, key, index, one, two in sorted(
            differences, key=lambda each: each[0].get("seq", 0)
        ):
            req = next((side[1].get("req") for side in (one, two) if side is not None), None)
            said = partial(self.message, names, key, index, one, two)
            self.violate(
                about, {"seq": about.get("seq", 0), "step": about.get("step", 0), "req": req}, said
            )

    def message(
        self, names: Sequence[str], key: Any, index: int, one: Side | None, two: Side | None
    ) -> str:
        """What the second run did instead, and the check in brackets. What the first did is told in front of it, if it can be."""
        left, right = (repr(side[0]) if side is not None else "nothing" for side in (one, two))
        check = f"[`{names[0]}` and `{names[1]}` differ at {self.label(key, index)}: {left} against {right}]"
        told = [_told(side) for side in (one, two)]
        if told[0] == told[1]:  # what differs is not in the sentence
            told[1] += f", as {right} and not {left}"
        other = f"{RUNS.get(names[1], names[1])}: {told[1]} {check}"
        return (
            other
            if one is not None and describe(dict(one[1])) is not None
            else f"{told[0]}; {other}"
        )

    def groups(self, trace: Sequence[Event]) -> Groups:
        relate, expressions = self.requirement.relate, self.requirement.expressions
        assert relate is not None
        where = self.where
        project = expressions["project"].bind(self.cap, self.cfg)
        per = expressions["per"].bind(self.cap, self.cfg) if "per" in expressions else None
        found: Groups = {}
        for event in trace:
            if event["kind"] == relate.event and (where is None or where(event)):
                key = hashable(per(event)) if per is not None else None
                found.setdefault(key, []).append((project(event), event))
        return found

    def difference(
        self, first: list[tuple[Any, Event]], second: list[tuple[Any, Event]]
    ) -> tuple[int, Side | None, Side | None] | None:
        """(index, left or None, right or None) of the first difference, or None if there is none."""
        relate = self.requirement.relate
        assert relate is not None
        if not relate.ordered:
            return _bag_difference(first, second)
        for index, (left, right) in enumerate(zip(first, second, strict=False)):
            if left[0] != right[0]:
                return index, left, right
        shorter = min(len(first), len(second))
        if len(first) == len(second) or relate.prefix:
            return None
        return (
            shorter,
            first[shorter] if len(first) > shorter else None,
            second[shorter] if len(second) > shorter else None,
        )

    def label(self, key: Any, index: int) -> str:
        relate = self.requirement.relate
        assert relate is not None
        return f"{relate.event} {index}" + (f" of {key!r}" if relate.per is not None else "")


def _told(side: Side | None) -> str:
    return (
        "nothing of the kind"
        if side is None
        else describe(dict(side[1])) or f"{side[1]['kind']} {side[0]!r}"
    )


def _bag_difference(
    first: list[Side], second: list[Side]
) -> tuple[int, Side | None, Side | None] | None:
    """The first item of either side that the other does not have as often; both, if each side has one."""
    ours, theirs = (Counter(hashable(value) for value, _ in side) for side in (first, second))
    one = next(
        (
            (index, item)
            for index, item in enumerate(first)
            if ours[hashable(item[0])] > theirs[hashable(item[0])]
        ),
        None,
    )
    two = next(
        (
            (index, item)
            for index, item in enumerate(second)
            if theirs[hashable(item[0])] > ours[hashable(item[0])]
        ),
        None,
    )
    if one is None and two is None:
        return None
    return (one or two or (0, None))[0], one and one[1], two and two[1]


def relate_runs(
    requirement: Requirement,
    traces: Mapping[str, Sequence[Event]],
    cap: Mapping[str, Any] | None = None,
    cfg: Mapping[str, Any] | None = None,
) -> RelateMonitor | None:
    """Compare the two runs that the requirement names; None if one of them was not made."""
    relate = requirement.relate
    assert relate is not None
    if any(run not in traces for run in relate.runs):
        return None
    monitor = RelateMonitor(requirement, cap or {}, cfg or {})
    monitor.compare([traces[run] for run in relate.runs], relate.runs)
    return monitor
