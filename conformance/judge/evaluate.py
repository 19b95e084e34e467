# SPDX-License-Identifier: Apache-2.0
"""The loop that runs monitors over a trace.

Monitors are indexed by kind of event, and by hook: an event reaches only those that look at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from kvconform.contract.events import constants_of
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
        self.parts = []

    def handlers(self) -> list[tuple[str, Handler]]:
        """Return no handlers."""
        return []


def monitor_for(
    requirement: Requirement,
    cap: Mapping[str, Any] | None = None,
    cfg: Mapping[str, Any] | None = None,
) -> Monitor:
    """Return a new monitor of the requirement.

    Raises ValueError for `relate`, which compares two runs (kvconform.judge.relation).
    """
    if requirement.pattern not in _MONITORS:
        raise ValueError(f"{requirement.id} relates two runs; it cannot be monitored on one")
    return _MONITORS[requirement.pattern](requirement, cap or {}, cfg or {})


def _looked_at(trace: Iterable[Event]) -> tuple[frozenset[str], frozenset[tuple[str, str]]]:
    """Return the kinds of a trace's events, and (kind, hook) of those that are about hooks."""
    events = [(event["kind"], event) for event in trace]
    hooks = {(kind, e["hook"]) for kind, e in events if kind in HOOKED and "hook" in e}
    return frozenset([kind for kind, _ in events]), frozenset(hooks)


class _Stakes:
    """The requirements that a trace with events of these kinds, and (kind, hook), can exercise."""

    def __init__(self, seen: frozenset[str], called: frozenset[tuple[str, str]]) -> None:
        self.seen = seen
        self.called = called
        self._known: dict[int, tuple[Requirement, bool]] = {}

    def include(self, req: Requirement) -> bool:
        """Return whether such a trace can exercise the requirement, which is not a `relate`.

        Every trace exercises a `count`: that something must occur is judged without any event.
        """
        known = self._known.get(id(req))
        if known is None:
            can = req.count is not None or pins_of(req).triggered(self.seen, self.called)
            # The requirement is cached, too, so that no other one can have its id.
            known = self._known[id(req)] = req, can
        return known[1]


_stakes = lru_cache(maxsize=64)(_Stakes)
"""Cached, because the traces of many workloads have the same few sets of kinds."""


def _stakes_of(trace: Iterable[Event]) -> _Stakes:
    return _stakes(*_looked_at(trace))


def at_stake(requirements: Iterable[Requirement], trace: Iterable[Event]) -> list[Requirement]:
    """Return the requirements that may fail on this trace, and every `relate`.

    Of those left out, no triggering event occurred, whatever their guards say.
    """
    stakes = _stakes_of(trace)
    return [req for req in requirements if req.pattern == "relate" or stakes.include(req)]


def evaluate(
    requirements: Iterable[Requirement],
    trace: Iterable[Event],
    cap: Mapping[str, Any] | None = None,
    cfg: Mapping[str, Any] | None = None,
) -> dict[str, Monitor]:
    """Run the monitors of all requirements but `relate` over a trace.

    Returns the finished monitors by requirement id. `cfg` follows what the trace changes of it.
    """
    cfg = dict(cfg or {})
    events = trace if isinstance(trace, (list, tuple)) else list(trace)
    stakes = _stakes_of(events)
    called = stakes.called
    monitors: dict[str, Monitor] = {}
    for req in requirements:
        if req.pattern == "relate":
            continue
        if stakes.include(req):
            monitors[req.id] = monitor_for(req, cap, cfg)
        else:
            monitors[req.id] = NullMonitor(req, cap or {}, cfg or {})
    watching: dict[str, list[Watch]] = {}
    of_hooks: dict[tuple[str, str], list[Watch]] = {key: [] for key in called}
    for monitor in monitors.values():
        for part, handle in monitor.parts:
            kind, only = pins_of(monitor.requirement).roles[part]
            watching.setdefault(kind, []).append((monitor, handle))
            if kind not in HOOKED:
                continue
            for key in called:
                if key[0] == kind and (only is None or key[1] in only):
                    of_hooks[key].append((monitor, handle))
    last: Event | None = None
    for event in events:
        last = event
        kind = event["kind"]
        if kind == "run.changed":
            cfg.update(constants_of(event))
        elif kind == "engine.lifecycle" and event["op"] == "killed":
            for monitor in monitors.values():
                monitor.cut_off()
        if kind in HOOKED and "hook" in event:
            watches = of_hooks[kind, event["hook"]]
        else:
            watches = watching.get(kind, [])
        for monitor, handle in watches:
            try:
                handle(event)
            except Exception as error:
                # A check that raises is a bug in the specification, not a verdict.
                monitor.fault(event, error)
    for monitor in monitors.values():
        monitor.finish(last)
        # Handlers refer to their monitor: without this, only the garbage collector frees it.
        monitor.parts = []
    return monitors
