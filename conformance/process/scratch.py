# SPDX-License-Identifier: Apache-2.0
"""Temporary folders that a later run removes if their process was killed.

A folder has a file that its process keeps locked. The lock ends with the process and with those
that it has forked, so it cannot be mistaken for that of another process with the same id. A folder
without such a file is not touched: those of --debug runs are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvconform.files import MEMORY

PREFIX = "kvconform-"
"""Start of the names of all temporary folders."""
OWNER = ".owner"
"""The file that is locked while the folder is in use."""

_locks: dict[Path, int] = {}


def make(kind: str, parent: str | None = None, *, keep: bool = False) -> Path:
    """Create a temporary folder `kvconform-<kind>-...`, for `discard`.

    `parent`: as `dir` of tempfile. `keep`: no later run removes it.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=parent))
    if not keep:
        # The lock is taken before the file has its name, so it is never found unlocked.
        unnamed = folder / f"{OWNER}.new"
        lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(folder / OWNER)
        _locks[folder] = lock
    return folder


def discard(folder: Path) -> None:
    """Remove a folder of `make`. Idempotent."""
    shutil.rmtree(folder, ignore_errors=True)
    lock = _locks.pop(folder, None)
    if lock is not None:
        os.close(lock)


@contextlib.contextmanager
def temporary(kind: str, parent: str | None = None) -> Iterator[Path]:
    """Create a temporary folder, and remove it at the end."""
    folder = make(kind, parent)
    try:
        yield folder
    finally:
        discard(folder)


def remove_abandoned() -> None:
    """Remove this user's temporary folders whose processes have ended without removing them."""
    for parent in {tempfile.gettempdir(), MEMORY}:
        with contextlib.suppress(OSError):
            for folder in sorted(Path(parent).glob(f"{PREFIX}*")):
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder while holding its lock: only one of several processes gets that."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return
        lock = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return  # not one of these folders, or gone
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have removed the folder before the lock was taken.
        if os.path.samestat(os.fstat(lock), os.stat(folder / OWNER)):
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # locked: in use; or gone
    finally:
        os.close(lock)
