# SPDX-License-Identifier: Apache-2.0
"""Whether threads of this process are blocked, as the operating system sees it.

Not as the interpreter sees it: before CPython 3.11.8, `sys._current_frames` may wait for ever if
another thread runs (gh-106883).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

PAUSE = 0.0003
"""Seconds for which this thread releases the interpreter's lock."""
LONGEST = 0.5
"""Seconds; a thread that never blocks is not waited for longer."""
_SWITCHES = b"ctxt_switches:\t"


class Look(NamedTuple):
    """A thread at one moment. It is blocked if later it looks the same, and is not runnable."""

    runnable: bool
    """Whether it runs, waits for a processor, or is about to begin."""
    switches: int
    """How often it has gone to sleep or lost its processor."""


GONE = Look(runnable=False, switches=-1)


def look_at(thread: threading.Thread) -> Look:
    """Return what a thread does now; GONE if it has ended, or where /proc does not tell."""
    if thread.ident is None:
        return Look(runnable=True, switches=0)
    # In a process that was forked, the main thread keeps the number that its parent's had.
    number = os.getpid() if thread is threading.main_thread() else thread.native_id
    try:
        with open(f"/proc/self/task/{number}/status", "rb") as file:
            text = file.read()
        _, voluntary, forced = text.split(_SWITCHES)
    except (OSError, ValueError):
        return GONE
    runnable = b"\nState:\tR" in text
    return Look(runnable, int(voluntary.split(maxsplit=1)[0]) + int(forced))


def wait_until_blocked(
    threads: Callable[[], Sequence[threading.Thread]],
    *,
    pause: float = PAUSE,
    longest: float = LONGEST,
) -> None:
    """Let other threads run until all of these have slept for `pause` seconds, or have ended.

    Returns after `longest` seconds in any case.
    """
    before = None
    since = time.monotonic()
    while (waited := threads()) and time.monotonic() - since < longest:
        time.sleep(pause)
        now = list(map(look_at, waited))
        if now == before and not any(look.runnable for look in now):
            return
        before = now
