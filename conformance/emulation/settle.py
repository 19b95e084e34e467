# SPDX-License-Identifier: Apache-2.0
"""`settle()`: let the connector's own host threads run until they are blocked."""

from __future__ import annotations

import sys
import threading
import time

from kvconform.emulation.context import active

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
    return [(id(frame), frame.f_lasti) if frame is not None else None for frame in found]
