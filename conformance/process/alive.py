# SPDX-License-Identifier: Apache-2.0
"""What a process has that may be at work: threads, sockets and child processes.

What connectors have is what the process did not have before it imported the first one. So a pool
that an earlier run has left counts, too. Sockets and processes are seen where the system lists them
in /proc, which is Linux.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvconform.process import watchdog

FILES = Path("/proc/self/fd")


@dataclass(frozen=True)
class Alive:
    """Threads, sockets and child processes of this process at one moment."""

    threads: frozenset[threading.Thread]
    sockets: frozenset[str]
    children: frozenset[int]

    @classmethod
    def now(cls) -> Alive:
        """Return those of this moment."""
        return cls(_threads(), frozenset(_sockets()), frozenset(_children()))

    def __bool__(self) -> bool:
        return bool(self.threads or self.sockets or self.children)

    def __or__(self, other: Alive) -> Alive:
        return Alive(
            self.threads | other.threads,
            self.sockets | other.sockets,
            self.children | other.children,
        )

    def __sub__(self, other: Alive) -> Alive:
        return Alive(
            self.threads - other.threads,
            self.sockets - other.sockets,
            self.children - other.children,
        )


class _Ours:
    """What belongs to no connector; `process`: the id of the process that it is about."""

    alive: Alive
    native: frozenset[int]
    process: int


def remember() -> None:
    """In a process that was forked since, take what it has now for what it had before connectors.

    It has other threads than its parent had when this module was imported. Only the first call in a
    process counts; call it before the connector is imported.
    """
    if _Ours.process != os.getpid():
        begin()


def begin() -> None:
    """Take what the process has now for what it had before connectors.

    For a process that judges several connectors: what one has left is not the next one's.
    """
    _Ours.alive, _Ours.native, _Ours.process = Alive.now(), _native(), os.getpid()


def adopt_native_threads() -> None:
    """Take the threads of native libraries for the harness's own: imports start some."""
    _Ours.native |= _native()


@contextmanager
def of_harness() -> Iterator[None]:
    """Take what begins within the block for the harness's own."""
    before, native = Alive.now(), _native()
    try:
        yield
    finally:
        _Ours.alive |= Alive.now() - before
        _Ours.native |= _native() - native


def of_connectors() -> Alive:
    """Return what connectors have in this process, also what earlier runs have left."""
    return Alive.now() - _Ours.alive


def threads_of_connectors() -> frozenset[threading.Thread]:
    """Return the Python threads that connectors have in this process."""
    return _threads() - _Ours.alive.threads


def native_threads_of_connectors() -> list[str]:
    """Return the names of the threads that native libraries of connectors have in this process."""
    names = []
    for task in _native() - _Ours.native - {watchdog.timer_thread()}:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append((watchdog.TASKS / str(task) / "comm").read_text().strip())
    return sorted(names)


def works_aside() -> bool:
    """Return whether connectors have threads or child processes in this process.

    Sockets do not count: libraries open some as well, and a client waits for its answers.
    """
    return bool(threads_of_connectors() or (_has_children() and _children() - _Ours.alive.children))


def _threads() -> frozenset[threading.Thread]:
    """Return the threads but for two that may be newer than a connector and are ours.

    In a forked process the main thread is the one that forked.
    """
    main = threading.main_thread()
    threads = threading.enumerate()
    return frozenset(t for t in threads if t is not main and t.name != watchdog.THREAD)


def _native() -> frozenset[int]:
    """Return the ids of the threads that are no Python threads."""
    return frozenset(watchdog.tasks() - {thread.native_id for thread in threading.enumerate()})


def _has_children() -> bool:
    """Return whether there is any child process. It takes a tenth of the time of `_children`."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children() -> set[int]:
    """Return the ids of the child processes. Unlike psutil, it does not read all processes."""
    found: set[int] = set()
    for task in watchdog.tasks():
        with contextlib.suppress(OSError):  # the thread has ended, or the kernel lists no children
            children = (watchdog.TASKS / str(task) / "children").read_text()
            found.update(map(int, children.split()))
    return found


def _sockets() -> set[str]:
    """Return the open sockets, by the names that the system gives them."""
    found = set()
    if FILES.is_dir():
        for name in os.listdir(FILES):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                found.add(os.readlink(FILES / name))
    return {name for name in found if name.startswith("socket:")}


begin()
