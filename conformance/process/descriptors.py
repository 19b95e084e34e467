# SPDX-License-Identifier: Apache-2.0
"""The open file descriptors of this process, by kind, where the system lists them in /proc."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections import Counter

from kvconform.process.alive import FILES

LISTENING = "listening sockets"
KINDS = (LISTENING, "other sockets", "files", "pipes", "other descriptors")


def can_list() -> bool:
    """Return whether the system lists the descriptors of a process."""
    return FILES.is_dir()


def by_kind() -> Counter[str]:
    """Count the open descriptors of each of KINDS."""
    found: Counter[str] = Counter()
    for name in os.listdir(FILES) if can_list() else ():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found[_kind(int(name), os.fstat(int(name)).st_mode)] += 1
    return found


def _kind(descriptor: int, mode: int) -> str:
    if stat.S_ISSOCK(mode):
        return LISTENING if _listens(descriptor) else "other sockets"
    if stat.S_ISREG(mode):
        return "files"
    return "pipes" if stat.S_ISFIFO(mode) else "other descriptors"


def _listens(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
