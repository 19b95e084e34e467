# SPDX-License-Identifier: Apache-2.0
"""Monitors: requirements that watch a trace. This is the base; the patterns are in kvconform.judge.monitor, the loop in kvconform.judge.evaluate.

A monitor counts how often its trigger matched (`exercised`): zero means that the run says nothing about the requirement.


The temporal patterns, after Dwyer, Avrunin and Corbett (ICSE 1999), on finite traces.

always, never  hold on every matching event
count          between min and max matching events per key
precede        a `before` event came earlier, and no `end` event since
respond        a `then` event comes later, no later than the next `by`; what is still open at the end of the trace is no violation
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvconform.contract.requirement import Match, Requirement
from kvconform.judge.guards import BoundJoin, hashable, joins_of

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

    def finish(self, last: Event | None = None) -> None:
        """The trace is over; `last` is its last event."""

    def __post_init__(self) -> None:
        expressions = self.requirement.expressions
        self.where = (
            expressions["where"].bind(self.cap, self.cfg) if "where" in expressions else None
        )
        self.by_kind = self.handlers()
        if self.requirement.exercised is not None:
            kind = self.requirement.exercised.event
            self.by_kind[kind] = (
                both(self.by_kind[kind], self.at_stake())
                if kind in self.by_kind
                else self.at_stake()
            )

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
            text = (
                f"it reads {error}, which is not there"
                if isinstance(error, KeyError)
                else f"{type(error).__name__}: {error}"
            )
            self.error = f"the check of {self.requirement.id} cannot be evaluated on {event['kind']} #{event.get('seq', '?')}: {text}"

    def violate(
        self, at: Event, about: Event, message: Callable[[], str], trigger: Event | None = None
    ) -> None:
        """Note a violation that came to light at `at` and is about `about`."""
        self.count += 1
        if len(self.violations) < KEPT:
            seq = at.get("seq", 0)
            violation = Violation(
                seq,
                about.get("seq", seq),
                about.get("step", 0),
                _request(about.get("req")),
                message,
                trigger,
            )
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


class InvariantMonitor(Monitor):
    """always, never."""

    def handlers(self) -> dict[str, Handler]:
        req = self.requirement
        assert req.event is not None
        expression = req.expressions["check"]
        where, check, wanted = (
            self.where,
            expression.bind(self.cap, self.cfg),
            req.always is not None,
        )

        def on_event(e: Event) -> None:
            if where is None or where(e):
                self.exercised += 1
                if (not check(e)) is wanted:
                    self.violate(e, e, lambda: self.describe(e, wanted))

        return {req.event: on_event}

    def describe(self, e: Event, wanted: bool) -> str:
        expression = self.requirement.expressions["check"]
        guard = self.requirement.expressions.get("where")
        if expression.constant:
            return f"{e['kind']} occurred" + (
                f" with `{guard.source}`: {guard.values(e)}" if guard else ""
            )
        source, values = expression.culprit(wanted, self.cap, self.cfg, e)
        return f"`{source}` is {'false' if wanted else 'true'}" + (f": {values}" if values else "")


class CountMonitor(Monitor):
    """count {per, min, max}."""

    def handlers(self) -> dict[str, Handler]:
        req = self.requirement
        assert req.event is not None and req.count is not None
        expression = req.expressions.get("per")
        where, per, most = (
            self.where,
            expression.bind(self.cap, self.cfg) if expression else None,
            req.count.max,
        )
        self.seen: dict[Any, int] = {}
        self.last: dict[Any, Event] = {}

        def on_event(e: Event) -> None:
            if where is None or where(e):
                self.exercised += 1
                key = hashable(per(e)) if per is not None else None
                number = self.seen[key] = self.seen.get(key, 0) + 1
                self.last[key] = e
                if most is not None and number > most:
                    self.violate(
                        e,
                        e,
                        lambda: f"{number} times {e['kind']}{self.of(e)}, at most {most} allowed",
                    )

        return {req.event: on_event}

    def of(self, e: Event) -> str:
        per = self.requirement.expressions.get("per")
        return f" for {per.values(e) or per.source}" if per else ""

    def finish(self, last: Event | None = None) -> None:
        req = self.requirement
        assert req.count is not None
        least = req.count.min
        if least is None or last is None:
            return
        if (
            req.count.per is None and not self.seen
        ):  # that it must occur at all is exercised by every run
            self.exercised = 1
            self.violate(last, last, lambda: f"{req.event} never occurred, at least {least} needed")
        for key, number in self.seen.items():
            if number < least:
                about = self.last[key]
                text = f"{number} times {req.event}{self.of(about)}, at least {least} needed"
                self.violate(last, about, lambda text=text: text)  # type: ignore[misc]


class PrecedeMonitor(Monitor):
    """precede {before, end}: the latest matching `before` is later than the latest matching `end`."""

    def handlers(self) -> dict[str, Handler]:
        req = self.requirement
        assert req.event is not None and req.precede is not None
        before = _Latest(joins_of(req)["before"].bind(self.cap, self.cfg))
        end = _Latest(joins_of(req)["end"].bind(self.cap, self.cfg)) if req.precede.end else None
        where, clock = self.where, [0]

        def on_trigger(t: Event) -> None:
            if where is None or where(t):
                self.exercised += 1
                opened = before.latest(t)
                if opened == 0 or (end is not None and end.latest(t) > opened):
                    self.violate(t, t, lambda: self.describe(t, opened > 0), t)

        def on_end(e: Event) -> None:
            clock[0] += 1
            assert end is not None
            end.add(e, clock[0])

        def on_before(e: Event) -> None:
            clock[0] += 1
            before.add(e, clock[0])

        steps: list[tuple[str, Handler]] = [(req.event, on_trigger)]
        if req.precede.end is not None:
            steps.append((req.precede.end.event, on_end))
        steps.append((req.precede.before.event, on_before))
        return _merged(steps)

    def describe(self, t: Event, ended: bool) -> str:
        assert self.requirement.precede is not None
        before = _match_text(self.requirement.precede.before)
        state = "was over before it" if ended else "came before it"
        return (
            f"{t['kind']} {'after' if ended else 'without'} {before}"
            + (f", which {state}" if ended else "")
            + self.values(t)
        )

    def values(self, t: Event) -> str:
        text = (
            self.requirement.expressions["before"].values(None, t)
            if "before" in self.requirement.expressions
            else ""
        )
        return f" ({text})" if text else ""


class _Latest:
    """When the latest event came that matches a trigger; 0 if none did."""

    def __init__(self, join: BoundJoin) -> None:
        self.join = join
        self.times: dict[Any, int] = {}
        self.events: dict[Any, list[tuple[int, Event]]] = {}

    def add(self, e: Event, time: int) -> None:
        if self.join.filter is not None and not self.join.filter(e):
            return
        key = self.join.key_e(e)
        self.times[key] = time
        if self.join.rest is not None:
            self.events.setdefault(key, []).append((time, e))

    def latest(self, t: Event) -> int:
        key = self.join.key_t(t)
        rest = self.join.rest
        if rest is None:
            return self.times.get(key, 0)
        return next((time for time, e in reversed(self.events.get(key, ())) if rest(e, t)), 0)


class RespondMonitor(Monitor):
    """respond {then, by}: open triggers wait for `then`; the next matching `by` makes the rest violations."""

    def handlers(self) -> dict[str, Handler]:
        req = self.requirement
        assert req.event is not None and req.respond is not None
        join = joins_of(req)["then"].bind(self.cap, self.cfg)
        deadline = (
            req.expressions["by"].bind(self.cap, self.cfg) if "by" in req.expressions else None
        )
        where, rest = self.where, join.rest
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
                    self.violate(e, t, lambda t=t: self.describe(t), t)  # type: ignore[misc]
                if late:
                    self.open[key] = (
                        [t for t in waiting if t not in late] if len(late) < len(waiting) else []
                    )
                    if not self.open[key]:
                        del self.open[key]

        def on_trigger(t: Event) -> None:
            if where is None or where(t):
                self.exercised += 1
                self.open.setdefault(join.key_t(t), []).append(t)

        return _merged(
            [
                (req.respond.then.event, on_then),
                (req.respond.by.event, on_by),
                (req.event, on_trigger),
            ]
        )

    def describe(self, t: Event) -> str:
        respond = self.requirement.respond
        assert respond is not None
        values = (
            self.requirement.expressions["then"].values(None, t)
            if "then" in self.requirement.expressions
            else ""
        )
        text = f" ({values})" if values else ""
        return f"{t['kind']} #{t.get('seq', '?')}{text} was not followed by {_match_text(respond.then)} before {_match_text(respond.by)}"

    def finish(self, last: Event | None = None) -> None:
        self.unresolved = sum(map(len, self.open.values()))


def _match_text(match: Match) -> str:
    return match.event + (f" where `{match.where}`" if match.where else "")


def _merged(steps: list[tuple[str, Handler]]) -> dict[str, Handler]:
    """One handler per kind; where several roles watch the same kind they act in the order given."""
    found: dict[str, Handler] = {}
    for kind, handler in steps:
        found[kind] = both(found[kind], handler) if kind in found else handler
    return found
