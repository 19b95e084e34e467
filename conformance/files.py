# SPDX-License-Identifier: Apache-2.0
"""Atomic writes and sizes of files, checks of folders, and scratch folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

from kvconform.errors import UsageError

MEMORY = "/dev/shm"
"""Directory whose files are in memory."""
ENOUGH = 2**30
"""Bytes that must be free there."""


def replace(path: Path, data: str | bytes) -> None:
    """Write a file atomically: readers see the old content or the new one, never a part.

    Text is encoded as UTF-8. Of two processes that write, the last one wins. OSError if the file
    cannot be written. A process that is killed meanwhile leaves `.NAME.PID.new` there: no other
    process removes it, because in a shared folder its writer may be alive on another machine.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        scratch.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def sizes_below(folder: Path, *, links: bool = False) -> list[int]:
    """Return the bytes of each regular file in a directory and below it; none if it is missing.

    `links`: links to such files count, too.
    """
    found = []
    # A thread of a connector's may remove files and directories meanwhile.
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(os.path.join(parent, name), follow_symlinks=links)
                if stat.S_ISREG(status.st_mode):
                    found.append(status.st_size)
    return found


def check_writable(option: str, folder: Path) -> None:
    """Raise UsageError, with the option that names the folder, unless it can be written to."""
    if why := obstacle(folder):
        raise UsageError(f"{option} {folder}: {why}; name another folder")


def obstacle(folder: Path) -> str:
    """Return why the folder cannot be made or written to; empty if it can.

    Tries it, and leaves nothing behind.
    """
    missing: list[Path] = []
    try:
        missing = [each for each in (folder, *folder.absolute().parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return why_not(folder, error)
    finally:
        for each in missing:
            with contextlib.suppress(OSError):  # not made, or another process has used it
                each.rmdir()
    return ""


def why_not(folder: Path, error: OSError) -> str:
    """Return why nothing can be written to the folder: the file in its way, or the error."""
    there = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    if not there.is_dir():
        return f"{there} is not a directory"
    return f"it cannot be written to ({error.strerror or error})"


def broken_toml(path: Path, error: ValueError) -> UsageError:
    """Return the error for a file that tomllib cannot read, with the place of the mistake."""
    if isinstance(error, UnicodeDecodeError):
        return UsageError(f"{path} is not UTF-8, which TOML must be: byte {error.start} is not")
    return UsageError(f"{path} is not valid TOML: {error}")


@cache
def scratch_root() -> str | None:
    """Return the parent of the stores of a run, as `dir` of tempfile; None: tempfile's default.

    A store is a directory with many small files, which cost nothing in memory. It is on a disk if
    TMPDIR says so, or if the memory is no place for what connectors write: less than 1 GiB is free
    (a container often has 64 MiB), or its files cannot be opened with O_DIRECT, as tiers on a disk
    do.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return None
    try:
        if shutil.disk_usage(MEMORY).free < ENOUGH:
            return None
        with tempfile.NamedTemporaryFile(prefix="kvconform-", dir=MEMORY) as file:
            os.close(os.open(file.name, os.O_RDWR | getattr(os, "O_DIRECT", 0)))
    except OSError:
        return None
    return MEMORY
