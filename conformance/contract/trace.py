# SPDX-License-Identifier: Apache-2.0
"""The trace of one engine run: a list of plain-dict events with a step counter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Event = dict[str, Any]
Place = tuple[int, Any]
"""A position in a trace: the number of events, and the step counters."""
RANKED = frozenset({"kv.changed", "kv.wrong", "load.due"})
"""Kinds of events that name their rank if there are several ranks (`Trace.rank`)."""


def own_settings(trace: Sequence[Mapping[str, Any]]) -> Mapping[str | None, Any]:
    """Return the fields of run.start that several engines have of their own, by engine."""
    engines = next((event for event in trace[:2] if event["kind"] == "run.engines"), None)
    return (engines or {}).get("own") or {}


def settings_on(trace: Sequence[Event], on: str | None) -> Event:
    """Return the fields of run.start as engine `on` of several has them. None: of all engines.

    Its block size is the largest then.
    """
    start = trace[0] if trace and trace[0]["kind"] == "run.start" else {}
    own = own_settings(trace)
    if on is None:
        sizes = [each["block_size"] for each in own.values()]
        return {**start, "block_size": max(start["block_size"], *sizes)} if sizes else start
    return {**start, **own[on]} if on in own else start


class Trace:
    """A list of events, numbered from 0; kinds and fields: `kvconform.contract.events`.

    Only `emit`, `amend` and `back_to` change it. `damaged`: the harness has damaged what the
    connector has stored; later events say so where it matters.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.step = 0
        self.rank: int | None = None
        self.damaged = False

    @classmethod
    def of(cls, events: list[Event]) -> Trace:
        """Return a trace of events that were recorded elsewhere. The list is shared."""
        trace = cls()
        trace.events = events
        return trace

    def emit(self, kind: str, /, **fields: Any) -> Event:
        """Append an event of `kind` and return it. Only `amend` may change it later."""
        if self.rank is not None and (kind in RANKED or "rank" in fields):
            fields["rank"] = self.rank
        event: Event = {"kind": kind, "seq": len(self.events), "step": self.step, **fields}
        self.events.append(event)
        return event

    def amend(self, event: Event, **fields: Any) -> None:
        """Set fields of an emitted event that were unknown at that time. Changes the event."""
        event.update(fields)

    def place(self) -> Place:
        """Return the current position, for `back_to`."""
        return len(self.events), self.step

    def back_to(self, place: Place) -> None:
        """Remove the events after `place`, and restore its step."""
        del self.events[place[0] :]
        self.step = place[1]


class PairTrace(Trace):
    """A trace of several engines, whose events name their engine in `on`.

    By default this is the engine that is driven now. Every engine has its own step counter.
    """

    def __init__(self) -> None:
        self.on: str | None = None
        self._steps: dict[str | None, int] = {}
        super().__init__()

    @property
    def step(self) -> int:  # type: ignore[override]
        """The step counter of the engine that is driven now."""
        return self._steps.get(self.on, 0)

    @step.setter
    def step(self, value: int) -> None:
        self._steps[self.on] = value

    def emit(self, kind: str, /, **fields: Any) -> Event:
        """Append an event as Trace.emit does, with its engine."""
        if self.on is not None and "on" not in fields:
            fields = {"on": self.on, **fields}
        return super().emit(kind, **fields)

    def place(self) -> Place:
        """Return the current position, with the step counters of all engines."""
        return len(self.events), dict(self._steps)

    def back_to(self, place: Place) -> None:
        """Remove the events after `place`, and restore all step counters."""
        self._steps = dict(place[1])
        del self.events[place[0] :]
