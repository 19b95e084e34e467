# SPDX-License-Identifier: Apache-2.0
"""Host threads under the emulation: torch modes for new ones, and a wait until they are blocked.

A torch mode applies only to the thread that entered it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvconform.emulation.blocked import wait_until_blocked
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


def settle() -> None:
    """Let the threads that the connector has started run until all of them are blocked.

    Then everything that they were given to queue is queued. On a GPU such a thread has queued its
    work long before a forward pass is over. Here the forward pass takes no time, so the scheduling
    of threads would decide whether the work is late, and so whether a missing wait is found.
    """
    emulation = active()
    wait_until_blocked(
        lambda: [
            thread
            for thread in threading.enumerate()
            if getattr(thread, "emulation", None) is emulation
        ]
    )
