# SPDX-License-Identifier: Apache-2.0
"""Threads that start while a device is emulated see it too: torch's modes belong to the thread that entered them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvconform.emulation.context import active, member
from kvconform.emulation.dispatch import Dispatch
from kvconform.emulation.patch import Patches
from kvconform.emulation.placement import Placement


@contextmanager
def modes() -> Iterator[None]:
    """The calling thread's torch calls go to the device of the emulation that the thread is part of."""
    with Dispatch(), Placement():
        yield


def patch_threads(patches: Patches) -> None:
    """Every thread that is started from now on is part of the emulation that starts it; its current stream is the default stream, as in
    CUDA."""
    start = threading.Thread.start

    def start_with_modes(thread: threading.Thread) -> None:
        run, emulation = thread.run, active()

        def run_with_modes() -> None:
            with member(emulation, None), modes():
                run()

        thread.run = run_with_modes  # type: ignore[method-assign]
        thread.emulation = emulation  # type: ignore[attr-defined]  # for settle()
        start(thread)

    patches.set(threading.Thread, "start", start_with_modes)
