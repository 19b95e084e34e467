# SPDX-License-Identifier: Apache-2.0
"""Host threads under the emulation: torch modes for new ones, and a wait until they are blocked.

A torch mode applies only to the thread that entered it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvconform.emulation.context import active, member
from kvconform.emulation.dispatch import Dispatch
from kvconform.emulation.patch import Patches
from kvconform.emulation.placement import Placement


@contextmanager
def modes() -> Iterator[None]:
    """Send the calling thread's torch calls to the device of the thread's emulation."""
    with Dispatch(), Placement():
        yield


def patch_threads(patches: Patches) -> None:
    """Make every thread started from now on part of the emulation that starts it.

    Its current stream is the default stream, as in CUDA.
    """
    start = threading.Thread.start

    def start_with_modes(thread: threading.Thread) -> None:
        run = thread.run
        emulation = active()

        def run_with_modes() -> None:
            with member(emulation, None), modes():
                run()

        thread.run = run_with_modes  # type: ignore[method-assign]
        thread.emulation = emulation  # type: ignore[attr-defined]  # for settle()
        start(thread)

    patches.set(threading.Thread, "start", start_with_modes)


PAUSE = 0.0003  # seconds for which this thread releases the interpreter's lock
LONGEST = 0.5  # seconds; a thread that never blocks is not waited for longer


def settle() -> None:
    """Let the threads that the connector has started run until all of them are blocked.

    Then everything that they were given to queue is queued. On a GPU such a thread has queued its
    work long before a forward pass is over. Here the forward pass takes no time, so the scheduling
    of threads would decide whether the work is late, and so whether a missing wait is found.
    """
    emulation = active()
    before = None
    since = time.monotonic()
    threads = [
        thread
        for thread in threading.enumerate()
        if getattr(thread, "emulation", None) is emulation
    ]
    while threads and time.monotonic() - since < LONGEST:
        time.sleep(PAUSE)
        places = _places(threads)
        if places == before and not any(map(_runnable, threads)):
            return
        before = places


def _runnable(thread: threading.Thread) -> bool:
    """Return whether a thread could run but waits for a processor.

    On a busy machine such a thread does not move, and is not blocked. Returns False where the
    system has no /proc.
    """
    try:
        with open(
            f"/proc/self/task/{thread.native_id}/stat", encoding="ascii", errors="replace"
        ) as file:
            return file.read().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False


def _places(threads: list[threading.Thread]) -> list[tuple[int, int] | None]:
    """Return each thread's frame and instruction; None for a thread that has ended."""
    frames = sys._current_frames()
    found = [frames.get(thread.ident or 0) for thread in threads]
    # CPython 3.11 has been seen to list an object here that is no frame.
    return [(id(frame), frame.f_lasti) if isinstance(frame, FrameType) else None for frame in found]
