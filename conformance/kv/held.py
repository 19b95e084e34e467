# SPDX-License-Identifier: Apache-2.0
"""Streams of a real CUDA device that are held: what they are given then waits for a release.

A held stream waits for a number in the host's memory (cuStreamWaitValue32). This takes nothing of
the device. Kernels that sleep would do the same, but processes that share a device would wait for
one another's. The numbers are written by a process of its own (`releaser`), which releases every
hold after `LIMIT`. Some code waits for a stream in a way that is not noticed here: it goes on then.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from kvconform.errors import EnvironmentProblem
from kvconform.kv import releaser
from kvconform.process import alive, clock

LIMIT = 0.05
"""Seconds after which a hold is released.

That is more than a step takes, also where other processes use the device. A stream whose hold ends
so is not held again in the step, or a hook with many waits of that kind would take too long.
"""
Wait = Callable[[int, int, int], None]
"""Makes a stream (its handle) wait until the number at an address is at least a given one."""


class Mark(NamedTuple):
    """A place in a stream: behind its hold of this number."""

    stream: int
    number: int


class Holds:
    """Holds of streams, and what streams wait for. Streams are handles; 0 is the default stream.

    Threads may share it.
    """

    def __init__(self, wait: Wait, address: int, requests: int) -> None:
        """`address`: of a page for the numbers. `requests`: descriptor of a pipe to `releaser`."""
        self._wait, self._address, self._requests = wait, address, requests
        self._lock = threading.RLock()
        self._places: dict[int, int] = {}
        self._last: dict[int, int] = defaultdict(int)
        self._released: dict[int, int] = defaultdict(int)
        self._waits: dict[int, list[tuple[int, Mark]]] = defaultdict(list)
        self._let_go: set[int] = set()

    def hold(self, stream: int) -> None:
        """Hold a stream from what it is given next on.

        Not beyond `releaser.PLACES` streams, not after a hold that ended by itself in this step,
        and not if the process that releases has ended.
        """
        with self._lock:
            place = self._places.setdefault(stream, len(self._places))
            last = self._last[stream]
            if place >= releaser.PLACES or stream in self._let_go:
                return
            if self._released[stream] < last <= self._ended(place):
                self._released[stream] = last
                self._let_go.add(stream)
                return
            if self._ask(place, last + 1, clock.monotonic() + LIMIT):
                self._last[stream] = last + 1
                self._wait(stream, self._address + 4 * place, last + 1)

    def next_step(self) -> None:
        """Note that a step has ended."""
        with self._lock:
            self._let_go.clear()
            for stream, place in self._places.items():
                if place < releaser.PLACES:
                    self._released[stream] = max(self._released[stream], self._ended(place))

    def _ended(self, place: int) -> int:
        """Return the number of a stream's last hold that has ended."""
        return ctypes.c_uint32.from_address(self._address + 4 * place).value

    def mark(self, stream: int) -> Mark:
        """Return the place behind all that the stream has been given."""
        return Mark(stream, self._last[stream])

    def follows(self, stream: int, mark: Mark) -> None:
        """Note that what the stream is given next waits for `mark`."""
        with self._lock:
            self._waits[stream].append((self._last[stream], mark))

    def release(self, mark: Mark | None = None) -> None:
        """Release the holds before a mark, and those before all that it waits for; None: all.

        The device notices it soon, not at once.
        """
        with self._lock:
            marks = [mark] if mark else [self.mark(stream) for stream in list(self._last)]
            while marks:
                stream, number = marks.pop()
                if number > self._released[stream]:
                    self._released[stream] = number
                    self._ask(self._places[stream], number, 0.0)
                waits = self._waits.pop(stream, [])
                marks += [other for at, other in waits if at <= number]
                self._waits[stream] = [wait for wait in waits if wait[0] > number]

    def end(self) -> None:
        """Release all holds, and end the process that releases."""
        with self._lock:
            self._ask(releaser.END, 0, 0.0)

    def _ask(self, place: int, number: int, when: float) -> bool:
        """Send a request; return whether there is a process that reads it."""
        try:
            os.write(self._requests, releaser.REQUEST.pack(place, number, when))
        except BrokenPipeError:
            return False
        return True


@contextmanager
def holds(
    wait: Wait, register: Callable[[int], Any], unregister: Callable[[int], Any]
) -> Iterator[Holds]:
    """Provide holds. At the end all are released.

    `register` makes a page of memory that begins at an address accessible to the device;
    `unregister` is called at the end, and returns when no stream waits for it any more.
    """
    file = os.memfd_create("kvconform-holds")
    os.ftruncate(file, mmap.PAGESIZE)
    memory = mmap.mmap(file, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_uint32.from_buffer(memory))
    read, write = os.pipe()
    with alive.of_harness():
        command = [sys.executable, "-I", "-S", releaser.__file__, str(read), str(file)]
        process = subprocess.Popen(
            command, pass_fds=(read, file), stdin=subprocess.DEVNULL, start_new_session=True
        )
    os.close(read)
    os.close(file)
    try:
        register(address)
        made = Holds(wait, address, write)
        try:
            yield made
        finally:
            made.end()  # a process that the connector forked may keep the pipe open
            unregister(address)
    finally:
        os.close(write)
        process.wait()
        memory.close()


@contextmanager
def on_this_device() -> Iterator[Holds]:
    """Provide holds of the current CUDA device's streams; EnvironmentProblem if it has none."""
    driver = ctypes.CDLL("libcuda.so.1")
    runtime: Any = torch.cuda.cudart()
    can_wait = False

    def check(status: Any) -> None:
        if int(status):
            raise EnvironmentProblem(
                f"the device's streams cannot be made to wait (CUDA error {int(status)});"
                " --emulate-cuda does without a GPU"
            )

    def wait(stream: int, address: int, number: int) -> None:
        nonlocal can_wait
        at_least = 0  # CU_STREAM_WAIT_VALUE_GEQ
        there = ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(number)
        status = driver.cuStreamWaitValue32_v2(*there, at_least)
        if not can_wait:
            check(status)
        # A later error is one that the connector's work has caused; its own next call raises it.
        can_wait = True

    def register(address: int) -> None:
        check(runtime.cudaHostRegister(address, mmap.PAGESIZE, 0))

    def unregister(address: int) -> None:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(address)

    with holds(wait, register, unregister) as made:
        yield made
