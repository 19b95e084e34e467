# SPDX-License-Identifier: Apache-2.0
"""A CPU on which the connector's threads are late: they run when something waits for them.

Nothing says when a thread that copies KV gets time: storage is slow, a machine is busy, and Python
runs one thread at a time. So each thread that begins within the run stops at the next Python call
that it makes, and goes on in three cases:

- The engine's thread is blocked, for instance because it waits for the thread.
- The engine has gone on for some steps since the thread stopped: more steps on a later rank, so
  that the ranks end a transfer in different steps.
- Stored content is asked for next, or the run ends.

Threads of native code are not stopped, nor are those that began before the run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvconform.emulation.blocked import Look, look_at, wait_until_blocked
from kvconform.emulation.patch import Patches
from kvconform.kv import device
from kvconform.kv.device import Cpu

PATIENCE = 20
"""Steps after which the stopped threads of the first rank go on."""
LAG = 8
"""How many more steps those of a rank stay than those of the rank before it."""
LOOK = 0.001
"""Seconds between two looks of a stopped thread at the engine's."""
LOOKS = 3
"""Looks that find the engine's thread asleep since the last one, until it counts as blocked."""
OURS = "kvconform-"
"""How the names of the harness's own threads begin."""


class _Engine:
    """The engine's thread, which creates this object."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._pauses = False  # until the others have done what they can

    def look(self) -> Look | None:
        """Return how the thread looks while it sleeps; None if it runs, or only pauses."""
        now = look_at(self._thread)
        return None if self._pauses or now.runnable else now

    def pause(self, threads: Callable[[], Sequence[threading.Thread]]) -> None:
        """Let these threads go on until they are blocked."""
        self._pauses = True
        try:
            wait_until_blocked(threads)
        finally:
            self._pauses = False


class _Gate:
    """Stops the threads of one rank."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._threads: list[threading.Thread] = []
        self._stopped: set[threading.Thread] = set()
        self._steps = 0  # since one was stopped
        self._open = threading.Event()
        self._asleep: Look | None = None  # the engine's thread, waiting for these threads

    def add(self, thread: threading.Thread) -> None:
        """Stop this thread, which is about to start, from now on."""
        run = thread.run

        def called(frame: Any, event: str, argument: Any) -> None:
            if not self._open.is_set() and not self._is_waited_for():
                self._stop(thread)

        def run_late() -> None:
            sys.setprofile(called)
            try:
                run()
            finally:
                sys.setprofile(None)  # what comes next takes the thread out of Python's list

        thread.run = run_late  # type: ignore[method-assign]
        self._threads.append(thread)

    def _is_waited_for(self) -> bool:
        """Return whether the engine's thread still sleeps where it was found to be blocked."""
        return self._asleep is not None and self._engine.look() == self._asleep

    def _stop(self, thread: threading.Thread) -> None:
        self._stopped.add(thread)
        before, looks = None, 0
        while looks < LOOKS and not self._open.wait(LOOK):
            now = self._engine.look()
            looks = looks + 1 if now is not None and now == before else 0
            before = now
        self._asleep = before
        self._stopped.discard(thread)

    def step(self, patience: int) -> None:
        """Count a step of the engine; let the threads go on if one was stopped for `patience`."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._engine.pause(lambda: [each for each in self._threads if each not in self._stopped])
        self._steps = self._steps + 1 if self._stopped else 0
        if self._steps > patience:
            self.let_go()

    def let_go(self) -> None:
        """Let the threads go on until all of them are blocked, and stop them again."""
        self._open.set()
        self._engine.pause(lambda: self._threads)
        self._open.clear()
        self._steps = 0

    def open(self) -> None:
        """Let the threads go on, and stop none of them any more."""
        self._open.set()


class LateThreads(Cpu):
    """The device of one run. The thread that creates it is the engine's."""

    def __init__(self) -> None:
        self._engine = _Engine()
        self._rank = 0
        self._gates: dict[int, _Gate] = {}
        self._gate_of: dict[threading.Thread, _Gate] = {}

    def starting(self, thread: threading.Thread) -> None:
        """Take note of a thread that starts now: it is the current rank's, or its starter's."""
        if thread.name.startswith(OURS):
            return
        gate = self._gate_of.get(threading.current_thread())
        if gate is None:
            gate = self._gates.setdefault(self._rank, _Gate(self._engine))
        self._gate_of[thread] = gate
        gate.add(thread)

    def driving(self, rank: int) -> None:
        """See Timeline."""
        self._rank = rank

    def step_over(self) -> None:
        """See Timeline."""
        if self._rank in self._gates:
            self._gates[self._rank].step(PATIENCE + LAG * self._rank)

    def catch_up(self) -> None:
        """See Timeline."""
        for gate in self._gates.values():
            gate.let_go()

    def close(self) -> None:
        """Let all threads go on for good."""
        for gate in self._gates.values():
            gate.open()


@contextmanager
def late_threads() -> Iterator[LateThreads]:
    """Provide the device. Patches `threading.Thread` until the end."""
    made = LateThreads()
    patches = Patches()
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if device.current is made:  # not of a run inside this one
            made.starting(thread)
        start(thread)

    patches.set(threading.Thread, "start", start_late)
    try:
        yield made
    finally:
        patches.restore()
        made.close()
