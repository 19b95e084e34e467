# SPDX-License-Identifier: Apache-2.0
"""What of the emulation belongs to a thread: which emulation it is part of, its current stream, and whether torch is left alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .machine import Queue

if TYPE_CHECKING:
    from .context import Emulation


class ThreadState(threading.local):
    """`emulation`: the one that the thread was started in, or entered; None in threads that are older. `queue`: the current one, None for
    the default stream, as in a thread that never chose one. `raw`: how many raw() are open; while one is, `guards` keep torch's calls out
    of the modes."""

    emulation: Emulation | None = None
    queue: Queue | None = None
    raw = 0
    guards: Any = None


STATE = ThreadState()


def _guard() -> None:
    functions = torch._C.DisableTorchFunction()
    functions.__enter__()
    STATE.guards = functions, torch._C._DisableTorchDispatch()


def _unguard() -> None:
    functions, dispatch = STATE.guards
    STATE.guards = None
    del dispatch  # its end is the guard's end
    functions.__exit__(None, None, None)


class Raw:
    """A context in which the thread's torch calls run at once on the bare host tensors. Entering it again inside costs nothing."""

    __slots__ = ()

    def __enter__(self) -> None:
        if not STATE.raw:
            _guard()
        STATE.raw += 1

    def __exit__(self, *exc: object) -> None:
        STATE.raw -= 1
        if not STATE.raw:
            _unguard()


RAW = Raw()


@contextmanager
def intercepted() -> Iterator[None]:
    """Suspends every raw() of the thread."""
    depth = STATE.raw
    if depth:
        STATE.raw = 0
        _unguard()
    try:
        yield
    finally:
        if depth:
            _guard()
            STATE.raw = depth


@contextmanager
def member(emulation: Emulation, queue: Queue | None) -> Iterator[None]:
    """The thread is part of an emulation, with this current stream and no raw(); afterwards it is what it was before."""
    outer = STATE.emulation, STATE.queue
    STATE.emulation, STATE.queue = emulation, queue
    try:
        with intercepted():
            yield
    finally:
        STATE.emulation, STATE.queue = outer
