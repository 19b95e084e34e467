# SPDX-License-Identifier: Apache-2.0
"""Threads that start while a device is emulated see it too: torch's modes belong to the thread that entered them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .dispatch import Dispatch
from .patch import Patches
from .placement import Placement

if TYPE_CHECKING:
    from .context import Emulation


@contextmanager
def modes(emulation: Emulation) -> Iterator[None]:
    """The calling thread's torch calls go to the emulated device."""
    with Dispatch(emulation), Placement(emulation):
        yield


def patch_threads(patches: Patches, emulation: Emulation) -> None:
    """Every thread that is started from now on runs in the modes; its current stream is the default stream, as in CUDA."""
    start = threading.Thread.start

    def start_with_modes(thread: threading.Thread) -> None:
        run = thread.run

        def run_with_modes() -> None:
            with modes(emulation):
                run()

        thread.run = run_with_modes  # type: ignore[method-assign]
        start(thread)

    patches.set(threading.Thread, "start", start_with_modes)
