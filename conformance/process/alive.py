# SPDX-License-Identifier: Apache-2.0
"""What a process has that may be at work: threads, sockets and child processes.

Sockets and processes are seen where the system lists them in /proc, which is Linux.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

FILES = Path("/proc/self/fd")
TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class Alive:
    """Threads, sockets and child processes of this process at one moment."""

    threads: frozenset[threading.Thread]
    sockets: frozenset[str]
    children: frozenset[int]

    @classmethod
    def now(cls) -> Alive:
        """Return those of this moment."""
        threads = frozenset(threading.enumerate())
        return cls(threads, frozenset(_sockets()), frozenset(_children()))

    def since(self, earlier: Alive) -> bool:
        """Return whether there is one that was not there earlier."""
        return bool(
            self.threads - earlier.threads
            or self.sockets - earlier.sockets
            or self.children - earlier.children
        )


def _children() -> set[int]:
    """Return the ids of the child processes. Unlike psutil, it does not read all processes."""
    found: set[int] = set()
    for task in TASKS.iterdir() if TASKS.is_dir() else ():
        with contextlib.suppress(OSError):  # the thread has ended, or the kernel lists no children
            found.update(map(int, (task / "children").read_text().split()))
    return found


def _sockets() -> set[str]:
    """Return the open sockets, by the names that the system gives them."""
    found = set()
    if FILES.is_dir():
        for name in os.listdir(FILES):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                found.add(os.readlink(FILES / name))
    return {name for name in found if name.startswith("socket:")}
