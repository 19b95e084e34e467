# SPDX-License-Identifier: Apache-2.0
"""What a program leaves behind when it has ended: processes, ports that these listen on, and shared memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

FOLDER = "/dev/shm"
MAPPED = re.compile(rf"^{FOLDER}/\S+")


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that are neither gone nor zombies."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def name_of(process: psutil.Process) -> str:
    """Its command line, or its number."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:120] or process.name()
    return str(process.pid)


def ports_of(process: psutil.Process) -> list[int]:
    """The TCP ports that it listens on."""
    with contextlib.suppress(psutil.Error, AttributeError):
        return [c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return []


class Shared:
    """Files in /dev/shm that a program has mapped. What was there before it, or is somebody else's too (a server's, a daemon's), is not its
    own."""

    def __init__(self) -> None:
        self._before = _listed()
        self._seen: set[str] = set()

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Take note of what these have mapped now."""
        for process in processes:
            self._seen |= _mapped(process.pid)

    def left(self, processes: Sequence[psutil.Process]) -> list[str]:
        """Paths that are still there, sorted. `processes`: what is left of the program."""
        self.look(processes)
        own = {path for path in self._seen - self._before if os.path.exists(path)}
        mine = {process.pid for process in processes}
        for pid in psutil.pids() if own else []:
            if pid not in mine:
                own -= _mapped(pid)
        return sorted(own)


def _listed() -> set[str]:
    with contextlib.suppress(OSError):
        return {f"{FOLDER}/{name}" for name in os.listdir(FOLDER)}
    return set()


def _mapped(pid: int) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            name = line[line.find("/") :] if FOLDER in line else ""
            if MAPPED.match(name) and not name.endswith("(deleted)"):
                found.add(name)
    return found
