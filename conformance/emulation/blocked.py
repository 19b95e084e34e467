# SPDX-License-Identifier: Apache-2.0
"""Whether threads of this process are blocked."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import TypeAlias

Place: TypeAlias = tuple[int, int] | None
"""A thread's frame and instruction; None for a thread that has ended."""
PAUSE = 0.0003
"""Seconds for which this thread releases the interpreter's lock."""
LONGEST = 0.5
"""Seconds; a thread that never blocks is not waited for longer."""


def wait_until_blocked(threads: Sequence[threading.Thread]) -> None:
    """Let other threads run until all of them are blocked."""
    before = None
    since = time.monotonic()
    while threads and time.monotonic() - since < LONGEST:
        time.sleep(PAUSE)
        places = places_of(threads)
        if places == before and not any(map(is_runnable, threads)):
            return
        before = places


def is_runnable(thread: threading.Thread) -> bool:
    """Return whether a thread is about to begin, or could run but waits for a processor.

    On a busy machine such a thread does not move, and is not blocked. Once it has begun, returns
    False where the system has no /proc.
    """
    if thread.ident is None:
        return True
    try:
        with open(
            f"/proc/self/task/{thread.native_id}/stat", encoding="ascii", errors="replace"
        ) as file:
            return file.read().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False


def places_of(threads: Sequence[threading.Thread]) -> list[Place]:
    """Return each thread's place."""
    frames = sys._current_frames()
    found = [frames.get(thread.ident or 0) for thread in threads]
    # CPython 3.11 has been seen to list an object here that is no frame.
    return [(id(frame), frame.f_lasti) if isinstance(frame, FrameType) else None for frame in found]
