# SPDX-License-Identifier: Apache-2.0
"""Monitors: requirements that watch a trace. This is the base; the patterns are in kvconform.patterns, the loop in kvconform.evaluate.

A monitor counts how often its trigger matched (`exercised`): zero means that the run says nothing about the requirement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvconform.requirement import Requirement

Event = Mapping[str, Any]
Handler = Callable[[Event], None]

KEPT = 20
"""Violations that are described; further ones are only counted."""


@dataclass(frozen=True, slots=True)
class Violation:
    """`seq`: when it came to light (what is earlier may explain it). `event`, `step`, `req`: what it is about. `trigger`: the capture."""

    seq: int
    event: int
    step: int
    req: str | None
    say: Callable[[], str]
    trigger: Event | None = None

    @property
    def message(self) -> str:
        """What is wrong, in words. Made when it is asked for: of many violations only one is reported."""
        return self.say()


@dataclass
class Monitor:
    """Base: bookkeeping. `unresolved` counts obligations still open when the trace ended; `error` is a check that raised."""

    requirement: Requirement
    cap: Mapping[str, Any]
    cfg: Mapping[str, Any]
    exercised: int = 0
    count: int = 0
    unresolved: int = 0
    violations: list[Violation] = field(default_factory=list)
    error: str | None = None

    def handlers(self) -> dict[str, Handler]:
        """What to call for which kind of event."""
        raise NotImplementedError

    def feed(self, event: Event) -> None:
        """Take one event. A check that raises is a defect of the specification, not a verdict: it sets `error`."""
        handler = self.by_kind.get(event["k"])
        if handler is not None:
            try:
                handler(event)
            except Exception as error:
                self.fault(event, error)

    def finish(self, last: Event | None = None) -> None:
        """The trace is over; `last` is its last event."""

    def __post_init__(self) -> None:
        expressions = self.requirement.expressions
        self.where = expressions["where"].bind(self.cap, self.cfg) if "where" in expressions else None
        self.by_kind = self.handlers()
        if self.requirement.exercised is not None:
            kind = self.requirement.exercised.event
            self.by_kind[kind] = both(self.by_kind[kind], self.at_stake()) if kind in self.by_kind else self.at_stake()

    def at_stake(self) -> Handler:
        """Counts the events of `exercised`: that nothing was broken says something only where something could have been."""
        expression = self.requirement.expressions.get("exercised")
        where = expression.bind(self.cap, self.cfg) if expression is not None else None

        def on_event(e: Event) -> None:
            if where is None or where(e):
                self.exercised += 1

        return on_event

    def fault(self, event: Event, error: Exception) -> None:
        """Note that the check raised on this event; the first time counts."""
        if self.error is None:
            text = f"it reads {error}, which is not there" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
            self.error = f"the check of {self.requirement.id} cannot be evaluated on {event['k']} #{event.get('seq', '?')}: {text}"

    def violate(self, at: Event, about: Event, message: Callable[[], str], trigger: Event | None = None) -> None:
        """Note a violation that came to light at `at` and is about `about`."""
        self.count += 1
        if len(self.violations) < KEPT:
            seq = at.get("seq", 0)
            violation = Violation(seq, about.get("seq", seq), about.get("step", 0), _request(about.get("req")), message, trigger)
            self.violations.append(violation)


def both(first: Handler, second: Handler) -> Handler:
    """Two handlers as one, in order."""

    def handler(event: Event) -> None:
        first(event)
        second(event)

    return handler


def _request(value: Any) -> str | None:
    """The request that an event is about; some events name several."""
    return ", ".join(value) or None if isinstance(value, (list, tuple)) else value
