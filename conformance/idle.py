# SPDX-License-Identifier: Apache-2.0
"""Steps without progress: when they are a stall, and which of them stay in its trace."""

from __future__ import annotations

import itertools
import time

from kvconform.target import Target
from kvconform.trace import Event, Place, Trace

STALL_STEPS = 60
COUNTERS = frozenset({"seq", "step", "called_seq", "of_step", "attempt", "digest"})
"""Fields that go up from step to step although nothing happens; metadata may hold such a number, too."""
PERIODS = 4
"""Steps after which a connector may say the same again: one that takes turns asks one request in one step, another in the next."""


class Idle:
    """The steps since there was progress. A connector may work in threads or in a server, so they are a stall only when they have taken the
    target's stall time; how many there are then depends on the machine's speed, which the trace must not."""

    def __init__(self, trace: Trace, target: Target) -> None:
        self.trace, self.target = trace, target
        self.over()

    def over(self) -> None:
        """There was progress: count anew."""
        self.since, self.ends = time.monotonic(), list[Place]()

    def stalled(self) -> bool:
        """One more step is done: whether that makes a stall. Waits a little if there were many."""
        self.ends.append(self.trace.place())
        if len(self.ends) < STALL_STEPS:
            return False
        if self.target.half != "both" or time.monotonic() - self.since > self.target.stall_seconds:
            return True
        time.sleep(0.002)
        return False

    def forget(self) -> None:
        """Cut the steps after STALL_STEPS off the trace, if each of them says what that one said, or they do so in turns of up to PERIODS.
        The run must not go on: who watches it does not count back."""
        if any(map(self._repeats, range(1, PERIODS + 1))):
            self.trace.back_to(self.ends[STALL_STEPS - 1])

    def _repeats(self, period: int) -> bool:
        ends = self.ends[STALL_STEPS - period - 1 :]
        steps = [self.trace.events[a:b] for (a, _), (b, _) in itertools.pairwise(ends)]
        if any(event.get("error") for step in steps[:period] for event in step):  # a crash at the shutdown may name the latest error
            return False
        return len(steps) >= period and all(_alike(one, other) for one, other in zip(steps, steps[period:], strict=False))


def _alike(one: list[Event], other: list[Event]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(value == b[name] for name, value in a.items() if name not in COUNTERS)
        for a, b in zip(one, other, strict=True)
    )
