# SPDX-License-Identifier: Apache-2.0
"""Checks of the folders that commands write to, before they begin."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from kvconform.errors import UsageError


def check_writable(option: str, folder: Path) -> None:
    """Raise UsageError, with the option that names the folder, unless it can be written to."""
    if why := obstacle(folder):
        raise UsageError(f"{option} {folder}: {why}; name another folder")


def obstacle(folder: Path) -> str:
    """Return why the folder cannot be made or written to; empty if it can.

    Tries it, and leaves nothing behind.
    """
    missing = [each for each in (folder, *folder.absolute().parents) if not each.exists()]
    try:
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
