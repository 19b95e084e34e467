# SPDX-License-Identifier: Apache-2.0
"""The trace of one engine run: a list of plain-dict events with a step counter."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]
Place = tuple[int, Any]
"""How many events a trace had, and what its steps were."""
RANKED = frozenset({"kv.changed", "kv.wrong", "load.due"})
"""Kinds that say which rank they are of, if there are several (`Trace.rank`)."""


class Trace:
    """Appends events (kinds and fields: `kvconform.contract.events`) and numbers them. `emit`, `amend` and `back_to` change the trace; nothing else does."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.step = 0
        self.rank: int | None = None

    @classmethod
    def of(cls, events: list[Event]) -> Trace:
        """A trace of events that were recorded elsewhere. The list is shared."""
        trace = cls()
        trace.events = events
        return trace

    def emit(self, kind: str, /, **fields: Any) -> Event:
        """Append an event of `kind`; returns the dict. `amend` changes it later; nothing else may."""
        if self.rank is not None and (kind in RANKED or "rank" in fields):
            fields["rank"] = self.rank
        event: Event = {"kind": kind, "seq": len(self.events), "step": self.step, **fields}
        self.events.append(event)
        return event

    def amend(self, event: Event, **fields: Any) -> None:
        """Fill in fields of an event that was emitted: what was not known then. Changes the event."""
        event.update(fields)

    def place(self) -> Place:
        """Where the trace is now, for `back_to`."""
        return len(self.events), self.step

    def back_to(self, place: Place) -> None:
        """Take back what came after `place`."""
        del self.events[place[0] :]
        self.step = place[1]


class PairTrace(Trace):
    """A trace whose events say which engine they are about: `on`, the one that is driven now unless the event says otherwise.

    Every engine counts its own steps.
    """

    def __init__(self) -> None:
        self.on: str | None = None
        self._steps: dict[str | None, int] = {}
        super().__init__()

    @property
    def step(self) -> int:  # type: ignore[override]
        """Steps of the engine that is driven now."""
        return self._steps.get(self.on, 0)

    @step.setter
    def step(self, value: int) -> None:
        self._steps[self.on] = value

    def emit(self, kind: str, /, **fields: Any) -> Event:
        """As Trace.emit."""
        return super().emit(
            kind,
            **({"on": self.on} if self.on is not None and "on" not in fields else {}),
            **fields,
        )

    def place(self) -> Place:
        """As Trace.place, with the steps of every engine."""
        return len(self.events), dict(self._steps)

    def back_to(self, place: Place) -> None:
        """As Trace.back_to."""
        self._steps = dict(place[1])
        del self.events[place[0] :]
