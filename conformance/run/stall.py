# SPDX-License-Identifier: Apache-2.0
"""Stalls: steps without progress, and how long to wait before they are one.

A connector may work in threads or in a server, and hold blocks until a lease runs out. So a run
waits in real time, longer while the connector has threads, sockets or processes, and then sets the
clock forward.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn, Protocol

from kvconform.config.target import Target
from kvconform.contract.trace import Event, Place, Trace
from kvconform.engine.engine import Engine
from kvconform.kv import device
from kvconform.process import clock

STALL_STEPS = 60
"""Steps without progress after which the harness waits."""
COUNTERS = frozenset({"seq", "step", "called_seq", "of_step", "digest"})
"""Fields that differ from step to step."""
PERIODS = 4
"""Longest period of a stall, in steps: a connector may handle its requests in turn."""
LEASE = 1200.0
"""Longest lease, in seconds of the virtual clock, that can run out before the end of a run."""
LEAP = 30.0
"""Seconds by which a step sets the clock forward, when all that is left may wait for a lease."""
BEFORE = {"stall": 0.25, "waiting": 1.0}
"""Part of the stall time that is waited before that, by its reason (StallDetector._reason)."""
MORE = 5.0
"""How many times these are waited while the connector has something that may be at work."""
PATIENCE = 60.0
"""Seconds that one process waits beyond that, in all: threads and sockets may be idle for ever.

Also those that earlier runs have left.
"""
NAP = 0.002
"""Seconds that one of these steps waits."""
LOOK = 0.05
"""Seconds between two looks at what the connector has."""


class Stalled(Exception):
    """Absence of progress for STALL_STEPS steps and the target's stall time."""


class _Spent:
    seconds = 0.0


class Waiting(Protocol):
    """The part of a driver that is needed here."""

    @property
    def trace(self) -> Trace:
        """The trace of the run."""

    @property
    def target(self) -> Target:
        """The connector under test."""

    @property
    def all_engines(self) -> Sequence[Engine]:
        """The engines that are driven."""

    def live_threads(self) -> int:
        """Return the number of threads that the connector has."""

    def may_work(self) -> bool:
        """Return whether the connector has threads, sockets or processes."""


class StallDetector:
    """Counter of the steps since the latest progress.

    The number of these steps depends on the machine's speed. The trace must not depend on it:
    `forget` cuts them off.
    """

    def __init__(self, driver: Waiting) -> None:
        self.trace = driver.trace
        self.driver = driver
        self.over()

    def over(self) -> None:
        """Count from zero, after progress."""
        self.since = self.alive = self._counted = clock.monotonic()
        self._looked = -math.inf
        self.ends: list[Place] = []
        self.leapt = 0.0

    def stalled(self) -> bool:
        """Count one more step, and return whether it makes a stall. Waits after STALL_STEPS."""
        self.ends.append(self.trace.place())
        target = self.driver.target
        if len(self.ends) < STALL_STEPS:
            return False
        if target.half != "both":
            return True
        reason = self._reason()
        if self.leapt < LEASE and reason is not None:
            if not self.leapt:  # once the clock was set forward, each further step does it
                if self._waits(BEFORE[reason] * target.stall_seconds):
                    give_time(NAP)
                    return False
                self._spend()
            self.leapt += LEAP
            clock.advance(LEAP)
            self.trace.emit("clock.advanced", seconds=LEAP, why=reason)
            return False
        if self._waits(target.stall_seconds):
            give_time(NAP)
            return False
        self._spend()
        return True

    def _spend(self) -> None:
        """Count what was waited because the connector might be at work."""
        _Spent.seconds += self.alive - self._counted
        self._counted = self.alive

    def _waits(self, seconds: float) -> bool:
        """Return whether to wait on: these seconds, also after the last sign of work."""
        now = clock.monotonic()
        most = min(MORE * seconds, PATIENCE - _Spent.seconds)
        if now - self.since < most and now - self._looked > LOOK:
            self._looked = now
            if self.driver.may_work():
                self.alive = now
        return now - self.alive <= seconds

    def _reason(self) -> str | None:
        """Return why the clock may be set forward.

        `stall`: only held blocks are left. `waiting`: requests wait, for memory that is held or for
        a load with a time limit. None with tokens in flight: then no time is waited for. With
        asynchronous scheduling, a step without tokens may be in flight.
        """
        engines = self.driver.all_engines
        if any(f.output.total_num_scheduled_tokens for engine in engines for f in engine.queue):
            return None
        waiting = any(engine.scheduler.has_unfinished_requests() for engine in engines)
        return "waiting" if waiting else "stall"

    def give_up(self, requests: Iterable[tuple[str, str]]) -> NoReturn:
        """Emit engine.stall and raise Stalled; `requests` are (id, status) of those that wait."""
        self.forget()
        self.trace.emit(
            "engine.stall",
            steps=STALL_STEPS,
            limit=self.driver.target.stall_seconds,
            threads=self.driver.live_threads(),
            advanced=self.leapt,
            waiting_on=[f"{req}: {status}" for req, status in sorted(requests)],
        )
        raise Stalled

    def forget(self) -> None:
        """Cut the steps after STALL_STEPS off the trace if they only repeat earlier ones.

        The steps may repeat with a period of up to PERIODS. The run must end afterwards, because
        watchers do not undo what they have counted.
        """
        if any(map(self._repeats, range(1, PERIODS + 1))):
            self.trace.back_to(self.ends[STALL_STEPS - 1])

    def _repeats(self, period: int) -> bool:
        ends = self.ends[STALL_STEPS - period - 1 :]
        steps = [self.trace.events[a:b] for (a, _), (b, _) in itertools.pairwise(ends)]
        # A crash at the shutdown may name the latest error.
        if any(event.get("error") for step in steps[:period] for event in step):
            return False
        later = zip(steps, steps[period:], strict=False)
        return len(steps) >= period and all(_alike(one, other) for one, other in later)


def give_time(seconds: float) -> None:
    """Wait, and let threads that the device holds up go on."""
    device.current.catch_up()
    time.sleep(seconds)


def _alike(one: list[Event], other: list[Event]) -> bool:
    """Return whether two steps have the same events."""
    one, other = _of_engine(one), _of_engine(other)
    return len(one) == len(other) and all(map(_same, one, other))


def _of_engine(events: list[Event]) -> list[Event]:
    return [event for event in events if event["kind"] != "clock.advanced"]


def _same(one: Event, other: Event) -> bool:
    if one.keys() != other.keys():
        return False
    return all(value == other[name] for name, value in one.items() if name not in COUNTERS)
