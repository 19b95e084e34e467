# SPDX-License-Identifier: Apache-2.0
"""`relate`: a property of two runs of one case, such as equal tokens with and without connector.

The matching events of each run are projected to values and grouped by `per` (one group if absent).
The groups must be equal. With `prefix`, a group that only stops earlier is equal, too: an abort may
land at another token. With `common`, one value that both
runs have is enough: a connector with threads may do more of one kind, or in other parts.

A run of ALIKE must also get as far as the first: it must not crash or stall if that does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvconform.contract.requirement import Requirement
from kvconform.judge.describe import describe
from kvconform.judge.guards import hashable
from kvconform.judge.monitor import Event, Handler, Monitor, Said

RUNS = {
    "no-connector": "without a connector",
    "pickled-metadata": "with metadata that was pickled on its way",
    "second-process": "in a process of its own over the same store",
    "hash-seed": "with another hash seed",
    "alone": "without the MultiConnector around it",
}
"""How the second of two runs differs from the first, in words."""

ALIKE = ("pickled-metadata", "second-process", "hash-seed")
"""Runs in which all of the connector is as in the first, and does the same."""
ENDINGS = ("engine.crash", "engine.stall")

Side = tuple[Any, Event]
"""The value that an event was projected to, and the event."""

Groups = dict[Any, list[Side]]
"""The sides of one run by the value of `per`, or by None if the requirement has no `per`."""

Difference = tuple[int, Side | None, Side | None]
"""An index in a group, and what either run has there; None if it has nothing."""


class RelateMonitor(Monitor):
    """The outcome of a `relate`, with the interface of a monitor.

    `violations` has the first difference of each group.
    """

    def handlers(self) -> list[tuple[str, Handler]]:
        """Return no handlers: two whole traces are compared."""
        return []

    def compare(self, traces: Sequence[Sequence[Event]], names: Sequence[str]) -> None:
        """Compare two traces, of the runs `names`, and record the violations."""
        try:
            first, second = (self.groups(trace) for trace in traces)
        except Exception as error:
            # As in a monitor, this is a defect of the specification.
            name = self.requirement.id
            self.error = f"the check of {name} failed: {type(error).__name__} {error}"
            return
        self.exercised = sum(map(len, first.values())) + sum(map(len, second.values()))
        end: Event = traces[0][-1] if traces[0] else {"kind": "run.end", "seq": 0, "step": 0}
        differences: list[tuple[Event, Any, Difference]] = []
        # In the order of the traces: that of a set would differ from process to process.
        for key in dict.fromkeys([*first, *second]):
            found = self.difference(first.get(key, []), second.get(key, []))
            if found is not None:
                one = found[1]
                differences.append((one[1] if one is not None else end, key, found))
        differences.sort(key=lambda each: each[0].get("seq", 0))
        for at, key, (index, one, two) in differences:
            req = next((side[1].get("req") for side in (one, two) if side is not None), None)
            about = {"seq": at.get("seq", 0), "step": at.get("step", 0), "req": req}
            self.add(at, about, partial(self.describe, names, key, index, one, two))
        ending = next((event for event in traces[1] if event["kind"] in ENDINGS), None)
        ended = any(event["kind"] in ENDINGS for event in traces[0])
        if names[1] in ALIKE and ending is not None and not ended:
            self.exercised += 1
            same_step = (e for e in reversed(traces[0]) if e.get("step", 0) <= ending["step"])
            at = next(same_step, end)
            self.add(at, at, partial(self.describe_ending, names, ending))

    def describe(
        self, names: Sequence[str], key: Any, index: int, one: Side | None, two: Side | None
    ) -> Said:
        """Return what the second run did instead of the first, and the check.

        What the first run did is left out if the event itself says it.
        """
        left = repr(one[0]) if one is not None else "nothing"
        right = repr(two[0]) if two is not None else "nothing"
        where = self.label(key, index)
        check = f"`{names[0]}` and `{names[1]}` differ at {where}: {left} against {right}"
        ours = _in_words(one)
        theirs = _in_words(two)
        if ours == theirs:  # the sentence does not contain what differs
            theirs += f", as {right} and not {left}"
        sentence = f"{RUNS.get(names[1], names[1])}: {theirs}"
        if one is None or describe(dict(one[1])) is None:
            sentence = f"{ours}; {sentence}"
        return sentence, check

    def describe_ending(self, names: Sequence[str], ending: Event) -> Said:
        """Return how the second run broke off, and the check."""
        check = f"`{names[1]}` ended with {ending['kind']} in step {ending['step']}"
        return f"{RUNS[names[1]]}: {describe(dict(ending))}", f"{check}, and `{names[0]}` did not"

    def groups(self, trace: Sequence[Event]) -> Groups:
        """Return the projected values of the matching events, by group."""
        relate = self.requirement.relate
        expressions = self.requirement.expressions
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

    def difference(self, first: list[Side], second: list[Side]) -> Difference | None:
        """Return the first difference of a group in two runs, or None if there is none."""
        relate = self.requirement.relate
        assert relate is not None
        if relate.common:
            return _nothing_in_common(first, second)
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
        """Return the name of a place in a group, for messages."""
        relate = self.requirement.relate
        assert relate is not None
        return f"{relate.event} {index}" + (f" of {key!r}" if relate.per is not None else "")


def _in_words(side: Side | None) -> str:
    if side is None:
        return "nothing of the kind"
    value, event = side
    return describe(dict(event)) or f"{event['kind']} {value!r}"


def _nothing_in_common(first: list[Side], second: list[Side]) -> Difference | None:
    """Return the first items if both runs have some, and none of them is equal."""
    ours = {hashable(value) for value, _ in first}
    theirs = {hashable(value) for value, _ in second}
    return (0, first[0], second[0]) if ours and theirs and not ours & theirs else None


def relate_runs(
    requirement: Requirement,
    traces: Mapping[str, Sequence[Event]],
    cap: Mapping[str, Any] | None = None,
    cfg: Mapping[str, Any] | None = None,
) -> RelateMonitor | None:
    """Compare the two runs that the requirement names; return None if one of them is missing."""
    relate = requirement.relate
    assert relate is not None
    if any(run not in traces for run in relate.runs):
        return None
    monitor = RelateMonitor(requirement, cap or {}, cfg or {})
    monitor.compare([traces[run] for run in relate.runs], relate.runs)
    return monitor
