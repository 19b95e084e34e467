# SPDX-License-Identifier: Apache-2.0
"""Steps without progress: when they are a stall, and which of them stay in its trace."""

from __future__ import annotations

import itertools
import time

from kvconform.target import Target
from kvconform.trace import Event, Place, Trace

STALL_STEPS = 60
COUNTERS = frozenset({"seq", "step", "called_seq", "of_step", "attempt"})
"""Fields that go up from step to step although nothing happens."""


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
        """Cut the steps after STALL_STEPS off the trace, if each of them says what that one said. The run must not go on: who watches it
        does not count back."""
        steps = [self.trace.events[a:b] for (a, _), (b, _) in itertools.pairwise(self.ends[STALL_STEPS - 2 :])]
        if not steps or any(event.get("error") for event in steps[0]):  # a crash at the shutdown may name the latest error by its number
            return
        if all(_alike(steps[0], step) for step in steps[1:]):
            self.trace.back_to(self.ends[STALL_STEPS - 1])


def _alike(one: list[Event], other: list[Event]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(value == b[name] for name, value in a.items() if name not in COUNTERS)
        for a, b in zip(one, other, strict=True)
    )
