# SPDX-License-Identifier: Apache-2.0
"""Monitors: requirements that watch a trace. The loop over a trace is in kvconform.judge.evaluate.

A monitor counts how often its trigger matched (`exercised`). Zero means that the run says nothing
about the requirement.

The patterns are temporal ones after Dwyer, Avrunin and Corbett (ICSE 1999), on finite traces:

always, never  hold on every matching event
count          between min and max matching events per key
precede        a `before` event came earlier, and no `end` event since
respond        a `then` event comes later, no later than the next `by`; what is still open at the
               end of the trace is no violation
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvconform.contract.events import ENGINE_FIELD
from kvconform.contract.requirement import Match, Requirement
from kvconform.judge.guards import BoundJoin, check_of, hashable, joins_of

Event = Mapping[str, Any]
Handler = Callable[[Event], None]
Said = tuple[str | None, str]
"""A sentence about what was found, if the event does not say it, and the check that was false."""

KEPT = 20
"""The number of violations that are recorded; further ones are only counted."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation of a requirement.

    `seq` is when it was detected: earlier events may explain it. `event` (a seq), `step` and `req`
    are what it is about. `engine` is the one that it happened on; None if there is only one, or if
    it is about all.
    """

    seq: int
    event: int
    step: int
    req: str | None
    say: Callable[[], Said]
    engine: str | None = None

    @property
    def check(self) -> str:
        """The condition that was false, and the values that it read.

        It is worded on demand: of many violations only one is reported.
        """
        return self.say()[1]

    @property
    def message(self) -> str:
        """What is wrong, in words: the check itself, if nothing else is said."""
        sentence, check = self.say()
        return sentence or check


@dataclass
class Monitor:
    """Base of the monitors: one requirement on one trace.

    `cap` has the connector's capabilities, `cfg` the fields of `run.start`. `count` is the number
    of violations. `unresolved` is the number of obligations that were still open when the trace
    ended. `error` is set if a check raised.
    """

    requirement: Requirement
    cap: Mapping[str, Any]
    cfg: Mapping[str, Any]
    exercised: int = 0
    count: int = 0
    unresolved: int = 0
    violations: list[Violation] = field(default_factory=list)
    error: str | None = None

    def handlers(self) -> list[tuple[str, Handler]]:
        """Return the parts of the requirement, by their names in Pins, with functions for events.

        Parts that look at the same event act in this order.
        """
        raise NotImplementedError

    def cut_off(self) -> None:
        """React to a kill of the process, after which nothing that was pending goes on."""

    def finish(self, last: Event | None = None) -> None:
        """Judge what needs the end of the trace; `last` is its last event."""

    def __post_init__(self) -> None:
        where = self.requirement.expressions.get("where")
        self.where = where.bind(self.cap, self.cfg) if where is not None else None
        self.parts = self.handlers()
        if self.requirement.exercised is not None:
            self.parts.append(("exercised", self.at_stake()))

    def at_stake(self) -> Handler:
        """Return a handler that counts the events of the requirement's `exercised`.

        A requirement that was not broken only passes where it could have been broken.
        """
        expression = self.requirement.expressions.get("exercised")
        where = expression.bind(self.cap, self.cfg) if expression is not None else None

        def on_event(e: Event) -> None:
            if where is None or where(e):
                self.exercised += 1

        return on_event

    def fault(self, event: Event, error: Exception) -> None:
        """Record that the check raised on this event; only the first time counts."""
        if self.error is None:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, KeyError):
                text = f"it reads {error}, which is not there"
            where = f"{event['kind']} #{event.get('seq', '?')}"
            name = self.requirement.id
            self.error = f"the check of {name} cannot be evaluated on {where}: {text}"

    def violate(self, at: Event, about: Event, check: Callable[[], str]) -> None:
        """Record a violation that was detected at `at` and is about `about`. `check` words it."""
        self.add(at, about, lambda: (None, check()))

    def add(self, at: Event, about: Event, say: Callable[[], Said]) -> None:
        """Record a violation, as `violate` does. `say` words it, and the check."""
        self.count += 1
        if len(self.violations) < KEPT:
            seq = at.get("seq", 0)
            violation = Violation(
                seq=seq,
                event=about.get("seq", seq),
                step=about.get("step", 0),
                req=_request(about.get("req")),
                say=say,
                engine=at.get(ENGINE_FIELD),
            )
            self.violations.append(violation)


def _request(value: Any) -> str | None:
    """Return the requests that an event is about as one string; some events name several."""
    if isinstance(value, (list, tuple)):
        return ", ".join(value) or None
    return value


class InvariantMonitor(Monitor):
    """always, never: the check holds, or does not hold, on every matching event."""

    def handlers(self) -> list[tuple[str, Handler]]:
        """Return the handler of the event."""
        check = check_of(self.requirement).bind(self.cap, self.cfg)
        wanted = self.requirement.always is not None

        def on_event(e: Event) -> None:
            holds = check(e)
            if holds is not None:
                self.exercised += 1
                if holds is not wanted:
                    cfg = dict(self.cfg)  # a restart may change it
                    self.violate(e, e, lambda: self.describe(e, wanted, cfg))

        return [("trigger", on_event)]

    def describe(self, e: Event, wanted: bool, cfg: Mapping[str, Any]) -> str:
        """Return the part of the check that decided, and the values that it read."""
        expression = self.requirement.expressions["check"]
        guard = self.requirement.expressions.get("where")
        if expression.constant:
            text = f"{e['kind']} occurred"
            return f"{text} with `{guard.source}`: {guard.values(e)}" if guard else text
        source, values = expression.culprit(wanted, self.cap, cfg, e)
        text = f"`{source}` is {'false' if wanted else 'true'}"
        return f"{text}: {values}" if values else text


class CountMonitor(Monitor):
    """count {per, min, max}: the number of matching events per key is within bounds."""

    def handlers(self) -> list[tuple[str, Handler]]:
        """Return the handler of the event."""
        req = self.requirement
        assert req.count is not None
        expression = req.expressions.get("per")
        where = self.where
        per = expression.bind(self.cap, self.cfg) if expression else None
        most = req.count.max
        self.seen: dict[Any, int] = {}
        self.last: dict[Any, Event] = {}
        first: dict[Any, int] = {}

        def on_event(e: Event) -> None:
            if where is None or where(e):
                self.exercised += 1
                key = hashable(per(e)) if per is not None else None
                before = first.setdefault(key, e.get("step", 0))
                number = self.seen[key] = self.seen.get(key, 0) + 1
                self.last[key] = e
                if most is not None and number > most:
                    text = f"{number} times {e['kind']}"
                    self.add(
                        e,
                        e,
                        lambda: (
                            f"this is number {number}, and the first was in step {before}",
                            f"{text}{self.of(e)}, at most {most} allowed",
                        ),
                    )

        return [("trigger", on_event)]

    def of(self, e: Event) -> str:
        """Return the key of an event, in words."""
        per = self.requirement.expressions.get("per")
        return f" for {per.values(e) or per.source}" if per else ""

    def finish(self, last: Event | None = None) -> None:
        """Compare the numbers with the minimum."""
        req = self.requirement
        assert req.count is not None
        least = req.count.min
        if least is None or last is None:
            return
        if req.count.per is None and not self.seen:
            # Every run exercises the requirement that something occurs.
            self.exercised = 1
            self.violate(last, last, lambda: f"{req.event} never occurred, at least {least} needed")
        for key, number in self.seen.items():
            if number < least:
                about = self.last[key]
                text = f"{number} times {req.event}{self.of(about)}, at least {least} needed"
                self.violate(last, about, lambda text=text: text)  # type: ignore[misc]


class PrecedeMonitor(Monitor):
    """precede {before, end}: the latest matching `before` is later than the latest `end`."""

    def handlers(self) -> list[tuple[str, Handler]]:
        """Return the handlers of the trigger, `end` and `before`, which act in this order."""
        req = self.requirement
        before = _Latest(joins_of(req)["before"].bind(self.cap, self.cfg))
        ends = req.precede is not None and req.precede.end is not None
        end = _Latest(joins_of(req)["end"].bind(self.cap, self.cfg)) if ends else None
        where = self.where
        time = itertools.count(1)

        def on_trigger(t: Event) -> None:
            if where is None or where(t):
                self.exercised += 1
                opened = before.latest(t)
                if opened == 0 or (end is not None and end.latest(t) > opened):
                    self.violate(t, t, lambda: self.describe(t, opened > 0))

        def on_end(e: Event) -> None:
            assert end is not None
            end.add(e, next(time))

        def on_before(e: Event) -> None:
            before.add(e, next(time))

        parts: list[tuple[str, Handler]] = [("trigger", on_trigger)]
        if end is not None:
            parts.append(("end", on_end))
        return [*parts, ("before", on_before)]

    def describe(self, t: Event, ended: bool) -> str:
        """Return which `before` is missing; `ended`: one came, and was over."""
        assert self.requirement.precede is not None
        before = _match_text(self.requirement.precede.before)
        if ended:
            return f"{t['kind']} after {before}, which was over before it{self.values(t)}"
        return f"{t['kind']} without {before}{self.values(t)}"

    def values(self, t: Event) -> str:
        """Return the values of the trigger that `before` reads, in brackets."""
        before = self.requirement.expressions.get("before")
        text = before.values(None, t) if before is not None else ""
        return f" ({text})" if text else ""


class _Latest:
    """When the latest event came that matches a trigger."""

    def __init__(self, join: BoundJoin) -> None:
        self.join = join
        self.times: dict[Any, int] = {}
        self.events: dict[Any, list[tuple[int, Event]]] = {}

    def add(self, e: Event, time: int) -> None:
        """Remember an event, if its filter holds. `time` grows from event to event."""
        if self.join.filter is not None and not self.join.filter(e):
            return
        key = self.join.key_e(e)
        self.times[key] = time
        if self.join.rest is not None:
            self.events.setdefault(key, []).append((time, e))

    def latest(self, t: Event) -> int:
        """Return the time of the latest event that matches the trigger, or 0."""
        key = self.join.key_t(t)
        rest = self.join.rest
        if rest is None:
            return self.times.get(key, 0)
        return next((time for time, e in reversed(self.events.get(key, ())) if rest(e, t)), 0)


class RespondMonitor(Monitor):
    """respond {then, by}: every trigger is followed by `then` no later than the next `by`.

    Open triggers wait for `then`. The next matching `by` makes those still open violations.
    """

    def handlers(self) -> list[tuple[str, Handler]]:
        """Return the handlers of `then`, `by` and the trigger, which act in this order."""
        req = self.requirement
        join = joins_of(req)["then"].bind(self.cap, self.cfg)
        by = req.expressions.get("by")
        deadline = by.bind(self.cap, self.cfg) if by is not None else None
        where = self.where
        rest = join.rest
        self.open: dict[Any, list[Event]] = {}

        def on_then(e: Event) -> None:
            if not self.open or (join.filter is not None and not join.filter(e)):
                return
            key = join.key_e(e)
            waiting = self.open.get(key)
            if waiting is not None:
                left = [t for t in waiting if not rest(e, t)] if rest is not None else []
                if left:
                    self.open[key] = left
                else:
                    del self.open[key]

        def on_by(e: Event) -> None:
            for key, waiting in list(self.open.items()):
                late = [t for t in waiting if deadline is None or deadline(e, t)]
                for t in late:
                    self.violate(e, t, lambda t=t: self.describe(t))  # type: ignore[misc]
                if len(late) == len(waiting):
                    del self.open[key]
                elif late:
                    self.open[key] = [t for t in waiting if t not in late]

        def on_trigger(t: Event) -> None:
            if where is None or where(t):
                self.exercised += 1
                self.open.setdefault(join.key_t(t), []).append(t)

        return [("then", on_then), ("by", on_by), ("trigger", on_trigger)]

    def describe(self, t: Event) -> str:
        """Return which `then` is missing for a trigger."""
        respond = self.requirement.respond
        assert respond is not None
        then = self.requirement.expressions.get("then")
        values = then.values(None, t) if then is not None else ""
        text = f" ({values})" if values else ""
        return (
            f"{t['kind']} in step {t.get('step', '?')}{text} was not followed by"
            f" {_match_text(respond.then)} before {_match_text(respond.by)}"
        )

    def cut_off(self) -> None:
        """Ask nothing more of what has begun: the process was killed."""
        self.open.clear()

    def finish(self, last: Event | None = None) -> None:
        """Count the triggers that still wait."""
        self.unresolved = sum(map(len, self.open.values()))


def _match_text(match: Match) -> str:
    return match.event + (f" where `{match.where}`" if match.where else "")
