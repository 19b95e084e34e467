# SPDX-License-Identifier: Apache-2.0
"""The host threads of a connector that copies from threads of its own: they are as fast as the streams, not as their scheduler pleases."""

from __future__ import annotations

import sys
import threading
import time

from kvconform.emulation.context import active

PAUSE = 0.0003  # seconds: the interpreter's lock is free for as long
LONGEST = 0.5  # seconds; a thread that never blocks is not waited for


def settle() -> None:
    """Let the threads that the connector has started run until all of them are blocked: what they were given to queue is queued then.

    On a GPU such a thread has queued its work long before a forward pass is over. Here the forward pass takes no time, so that a thread
    would be late or early by chance, and a missing wait would be found by chance."""
    emulation, before, since = active(), None, time.monotonic()
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
    """Whether a thread could run and waits for a processor: on a busy machine it stays where it is, and is not blocked. False where the
    system does not tell."""
    try:
        with open(
            f"/proc/self/task/{thread.native_id}/stat", encoding="ascii", errors="replace"
        ) as file:
            return file.read().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False


def _places(threads: list[threading.Thread]) -> list[tuple[int, int] | None]:
    """Where each thread is: its frame and instruction; None for one that has ended."""
    frames = sys._current_frames()
    found = [frames.get(thread.ident or 0) for thread in threads]
    return [(id(frame), frame.f_lasti) if frame is not None else None for frame in found]
