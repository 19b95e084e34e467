# SPDX-License-Identifier: Apache-2.0
"""Runs monitors over a trace, indexed by event kind: an event touches only the monitors that look at its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from kvconform.contract.requirement import Requirement
from kvconform.judge.guards import HOOKED, pins_of
from kvconform.judge.monitor import (
    CountMonitor,
    Event,
    Handler,
    InvariantMonitor,
    Monitor,
    PrecedeMonitor,
    RespondMonitor,
)

Watch = tuple[Monitor, Handler]

_MONITORS: dict[str, type[Monitor]] = {
    "always": InvariantMonitor,
    "never": InvariantMonitor,
    "count": CountMonitor,
    "precede": PrecedeMonitor,
    "respond": RespondMonitor,
}


class NullMonitor(Monitor):
    """Monitor of a requirement whose events do not occur in the trace."""

    def __post_init__(self) -> None:
        self.by_kind = {}

    def handlers(self) -> dict[str, Handler]:
        return {}


def monitor_for(
    requirement: Requirement,
    cap: Mapping[str, Any] | None = None,
    cfg: Mapping[str, Any] | None = None,
) -> Monitor:
    """A fresh monitor. `relate` has none (kvconform.judge.relation): ValueError."""
    if requirement.pattern not in _MONITORS:
        raise ValueError(f"{requirement.id} relates two runs; it cannot be monitored on one")
    return _MONITORS[requirement.pattern](requirement, cap or {}, cfg or {})


def _looked_at(trace: Iterable[Event]) -> tuple[set[str], set[tuple[str, str]]]:
    """The kinds of a trace's events, and (kind, hook) of those that are about hooks."""
    seen: set[str] = set()
    called: set[tuple[str, str]] = set()
    for event in trace:
        kind = event["kind"]
        seen.add(kind)
        if kind in HOOKED and "hook" in event:
            called.add((kind, event["hook"]))
    return seen, called


class _Stakes:
    """Of the traces that have events of these kinds, and of these (kind, hook): which requirements they can put to the test."""

    def __init__(self, seen: frozenset[str], called: frozenset[tuple[str, str]]) -> None:
        self.seen, self.called = seen, called
        self._known: dict[int, tuple[Requirement, bool]] = {}

    def include(self, req: Requirement) -> bool:
        """That something must occur at all, every trace puts to the test. Not for `relate`."""
        known = self._known.get(id(req))
        if known is None:  # the requirement is kept, too: nothing else can have its id
            say = req.count is not None or pins_of(req).triggered(self.seen, self.called)
            known = self._known[id(req)] = req, say
        return known[1]


_stakes = lru_cache(maxsize=64)(_Stakes)
"""Many workloads come to the same few sets of kinds."""


def _stakes_of(trace: Iterable[Event]) -> _Stakes:
    seen, called = _looked_at(trace)
    return _stakes(frozenset(seen), frozenset(called))


def at_stake(requirements: Iterable[Requirement], trace: Iterable[Event]) -> list[Requirement]:
    """Without those of which a run says nothing whatever their guards say: no event of theirs occurred. None of these can fail on it."""
    stakes = _stakes_of(trace)
    return [req for req in requirements if req.pattern == "relate" or stakes.include(req)]


def evaluate(
    requirements: Iterable[Requirement],
    trace: Iterable[Event],
    cap: Mapping[str, Any] | None = None,
    cfg: Mapping[str, Any] | None = None,
) -> dict[str, Monitor]:
    """Run the monitors of all requirements (without `relate`) over a trace; finished monitors by requirement id."""
    events = trace if isinstance(trace, (list, tuple)) else list(trace)
    stakes = _stakes_of(events)
    called = stakes.called
    monitors = {
        req.id: monitor_for(req, cap, cfg)
        if stakes.include(req)
        else NullMonitor(req, cap or {}, cfg or {})
        for req in requirements
        if req.pattern != "relate"
    }
    watching: dict[str, list[Watch]] = {}
    of_hooks: dict[tuple[str, str], list[Watch]] = {key: [] for key in called}
    for monitor in monitors.values():
        for kind, handle in monitor.by_kind.items():
            watching.setdefault(kind, []).append((monitor, handle))
            if kind in HOOKED:
                only = pins_of(monitor.requirement).hooks[kind]
                for key in (
                    called if only is None else called.intersection((kind, hook) for hook in only)
                ):
                    if key[0] == kind:
                        of_hooks[key].append((monitor, handle))
    last: Event | None = None
    for event in events:
        last = event
        kind = event["kind"]
        watches = (
            of_hooks[kind, event["hook"]]
            if kind in HOOKED and "hook" in event
            else watching.get(kind, ())
        )
        for monitor, handle in watches:
            try:
                handle(event)
            except (
                Exception
            ) as error:  # a check that raises is a bug in the specification, not a verdict
                monitor.fault(event, error)
    for monitor in monitors.values():
        monitor.finish(last)
        monitor.by_kind = {}  # they hold the monitor: nothing of it would go before the garbage collector comes
    return monitors
