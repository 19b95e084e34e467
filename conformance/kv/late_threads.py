# SPDX-License-Identifier: Apache-2.0
"""A CPU on which the connector's threads are late: they run when something waits for them.

Nothing says when a thread that copies KV gets time: storage is slow, a machine is busy, and Python
runs one thread at a time. So each thread that begins within the run stops at the next call or
return, of Python or of C, and goes on in these cases:

- The engine's thread sleeps, for instance because it waits for the thread.
- The engine's thread has done no step for OVERDUE seconds: it may poll the thread.
- The engine has gone on for some steps since the thread stopped: more steps on a later rank, so
  that the ranks end a transfer in different steps.
- Stored content is asked for next, the harness waits for something, or the run ends.

Threads of native code are not stopped, nor are those that began before the run, or in a process
that was forked.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvconform.emulation.blocked import LONGEST, PAUSE, Look, look_at, wait_until_blocked
from kvconform.emulation.patch import Patches
from kvconform.kv import device
from kvconform.kv.device import Cpu
from kvconform.process import clock

PATIENCE = 20
"""Steps after which the stopped threads of the first rank go on."""
LAG = 8
"""How many more steps those of a rank stay than those of the rank before it."""
LOOK = 0.001
"""Seconds between two looks of a stopped thread at the engine's."""
LOOKS = 3
"""Looks that find the engine's thread asleep since the one before, until it counts as blocked."""
MANY = 200
"""Calls of threads that the engine waits for, each with a look at the engine's thread."""
FRESH = 0.0002
"""Seconds for which a look holds after these calls: it takes longer than a call."""
OVERDUE = 0.15
"""Seconds without a step after which nothing is late any more, until the next step."""
PAUSED = 2.0
"""The same while the engine's thread waits until the others are blocked or stopped."""
QUIET = 0.005
"""Seconds for which threads that were let go must have slept until they are stopped again."""
BUSY = 0.05
"""Seconds for which a step waits, at most, until threads are blocked or stopped."""
OURS = "kvconform-"
"""How the names of the harness's own threads begin."""


class _Engine:
    """The engine's thread, which creates this object."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._process = os.getpid()
        self._pauses = False  # until the others have done what they can
        self._latest = clock.monotonic()  # when it did its latest step

    def look(self) -> Look | None:
        """Return how the thread looks while it sleeps; None if it runs, or only pauses."""
        now = look_at(self._thread)
        return None if self._pauses or now.runnable else now

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process was forked since; none of the stopped threads are in it."""
        return os.getpid() != self._process

    @property
    def overdue(self) -> bool:
        """Whether its latest step was long ago."""
        return clock.monotonic() - self._latest > (PAUSED if self._pauses else OVERDUE)

    def pause(
        self,
        threads: Callable[[], Sequence[threading.Thread]],
        *,
        quiet: float = PAUSE,
        longest: float = LONGEST,
    ) -> None:
        """Wait until these threads are blocked; see wait_until_blocked."""
        self._pauses = True
        try:
            wait_until_blocked(threads, pause=quiet, longest=longest)
        finally:
            self._pauses = False
            self._latest = clock.monotonic()


class _Gate:
    """Stops the threads of one rank."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._threads: set[threading.Thread] = set()
        self._stopped: set[threading.Thread] = set()
        self._steps = 0  # since one was stopped
        self._open = threading.Event()
        self._for_good = False
        self._asleep: Look | None = None  # the engine's thread, when it was found to be blocked
        self._calls, self._looked = 0, 0.0  # since then, and when it was looked at

    def add(self, thread: threading.Thread) -> None:
        """Stop this thread, which is about to start, from now on."""
        run = thread.run

        def called(frame: Any, event: str, argument: Any) -> None:
            if self._for_good or self._engine.is_elsewhere:
                sys.setprofile(None)
            elif not self._open.is_set() and not self._goes_on():
                self._stop(thread)

        def run_late() -> None:
            sys.setprofile(called)
            try:
                run()
            finally:
                sys.setprofile(None)  # what comes next takes the thread out of Python's list
                self.remove(thread)

        thread.run = run_late  # type: ignore[method-assign]
        thread.kvconform_gate = self  # type: ignore[attr-defined]
        self._threads.add(thread)

    def remove(self, thread: threading.Thread) -> None:
        """Forget a thread, which ends, or could not be started."""
        self._threads.discard(thread)
        vars(thread).pop("run", None)

    def _goes_on(self) -> bool:
        """Return whether the engine's thread is overdue, or still sleeps as when it was blocked."""
        if self._engine.overdue:
            return True
        if self._asleep is None:
            return False
        now = clock.monotonic()
        self._calls += 1
        if self._calls < MANY or now - self._looked >= FRESH:
            self._looked = now
            if self._engine.look() != self._asleep:
                self._asleep = None
        return self._asleep is not None

    def _stop(self, thread: threading.Thread) -> None:
        self._stopped.add(thread)
        before, looks = None, 0
        while looks < LOOKS and not self._open.wait(LOOK) and not self._engine.overdue:
            now = self._engine.look()
            looks = looks + 1 if now is not None and now == before else 0
            before = now
        if looks == LOOKS:
            self._asleep, self._calls = before, 0
        self._stopped.discard(thread)

    def step(self, patience: int) -> None:
        """Count a step of the engine; let the threads go on if one was stopped for `patience`."""
        self._engine.pause(lambda: [*self._threads - self._stopped], longest=BUSY)
        self._steps = self._steps + 1 if self._stopped else 0
        if self._steps > patience:
            self.let_go()

    def let_go(self) -> None:
        """Let the threads go on until all of them are blocked, and stop them again."""
        if self._threads:
            self._open.set()
            self._engine.pause(lambda: [*self._threads], quiet=QUIET)
            self._open.clear()
        self._steps = 0

    def end(self) -> None:
        """Let the threads go on, and stop none of them any more."""
        self._for_good = True
        self._open.set()


class LateThreads(Cpu):
    """The device of one run. The thread that creates it is the engine's."""

    def __init__(self) -> None:
        self._engine = _Engine()
        self._rank = 0
        self._gates: dict[int, _Gate] = {}

    def start(self, thread: threading.Thread, start: Callable[[threading.Thread], None]) -> None:
        """Start a thread: one of the current rank's, or of its starter's, unless it is ours."""
        if self._engine.is_elsewhere or thread.name.startswith(OURS):
            start(thread)
            return
        gate = getattr(threading.current_thread(), "kvconform_gate", None)
        if gate is None:
            gate = self._gates.setdefault(self._rank, _Gate(self._engine))
        gate.add(thread)
        try:
            start(thread)
        except BaseException:
            gate.remove(thread)
            raise

    def driving(self, rank: int) -> None:
        """See Timeline."""
        self._rank = rank

    def step_over(self) -> None:
        """See Timeline."""
        gate = self._gates.get(self._rank)
        if gate is not None and not self._engine.is_elsewhere:
            gate.step(PATIENCE + LAG * self._rank)

    def catch_up(self) -> None:
        """See Timeline."""
        if not self._engine.is_elsewhere:
            for gate in list(self._gates.values()):
                gate.let_go()

    def close(self) -> None:
        """Let all threads go on for good."""
        if not self._engine.is_elsewhere:
            for gate in list(self._gates.values()):
                gate.end()


@contextmanager
def late_threads() -> Iterator[LateThreads]:
    """Provide the device. Patches `threading.Thread` until the end."""
    made = LateThreads()
    patches = Patches()
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if device.current is made:  # not of a run inside this one
            made.start(thread, start)
        else:
            start(thread)

    patches.set(threading.Thread, "start", start_late)
    try:
        yield made
    finally:
        patches.restore()
        made.close()
