# SPDX-License-Identifier: Apache-2.0
"""Streams of a real CUDA device that are held: what they are given then waits for a release.

A held stream waits for a number in the host's memory (cuStreamWaitValue32). This takes nothing of
the device. Kernels that sleep would do the same, but processes that share a device would wait for
one another's. The numbers are written by a process of its own (`releaser`), which releases a hold
after `LIMIT` if nobody else does: what waits for a held stream in a way that this process does not
see goes on then.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvconform.errors import EnvironmentProblem
from kvconform.kv import releaser
from kvconform.process import alive

LIMIT = 0.01
"""Seconds after which a hold is released.

That is many times what a case's copies take, and what the host takes between two calls for work. It
is not what the host takes to load a kernel for the first time.
"""
Wait = Callable[[int, int, int], None]
"""Makes a stream (its handle) wait until the number at an address is at least a given one."""


class Holds:
    """Holds of streams, numbered from 1; threads may share it."""

    def __init__(self, wait: Wait, address: int, requests: int) -> None:
        """`address`: of the number of the last hold released. `requests`: descriptor of a pipe."""
        self._wait, self._address, self._requests = wait, address, requests
        self._lock = threading.Lock()
        self._last = self._released = 0

    def hold(self, stream: int) -> None:
        """Hold a stream from what it has been given on. `stream`: its handle; 0: the default."""
        with self._lock:
            self._last += 1
            self._ask(self._last, time.monotonic() + LIMIT)
            self._wait(stream, self._address, self._last)

    def release(self) -> None:
        """Release all holds. The device notices it soon, not at once."""
        with self._lock:
            if self._released < self._last:
                self._released = self._last
                self._ask(self._last, 0.0)

    def _ask(self, number: int, when: float) -> None:
        os.write(self._requests, releaser.REQUEST.pack(number, when))


@contextmanager
def holds(
    wait: Wait, register: Callable[[int], Any], unregister: Callable[[int], Any]
) -> Iterator[Holds]:
    """Provide holds. At the end all are released, and the streams must have noticed it.

    `register` makes a page of memory that begins at an address accessible to the device;
    `unregister` is called when no stream waits for it any more.
    """
    file = os.memfd_create("kvconform-holds")
    os.ftruncate(file, mmap.PAGESIZE)
    memory = mmap.mmap(file, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_uint32.from_buffer(memory))
    read, write = os.pipe()
    with alive.of_harness():
        command = [sys.executable, "-I", "-S", releaser.__file__, str(read), str(file)]
        process = subprocess.Popen(command, pass_fds=(read, file), stdin=subprocess.DEVNULL)
    os.close(read)
    os.close(file)
    try:
        register(address)
        try:
            made = Holds(wait, address, write)
            yield made
            made.release()
        finally:
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

    def wait(stream: int, address: int, number: int) -> None:
        check(
            driver.cuStreamWaitValue32_v2(
                ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(number), 0
            )
        )

    def check(status: int) -> None:
        if int(status):
            raise EnvironmentProblem(
                f"the device's streams cannot be made to wait (CUDA error {int(status)});"
                " --emulate-cuda does without a GPU"
            )

    def unregister(address: int) -> None:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(address)

    with holds(
        wait, lambda address: check(runtime.cudaHostRegister(address, mmap.PAGESIZE, 0)), unregister
    ) as made:
        yield made
