# SPDX-License-Identifier: Apache-2.0
"""Atomic writes of files, and the directory for temporary ones."""

from __future__ import annotations

import os
from pathlib import Path


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


def scratch_root() -> str | None:
    """Return the parent of the stores of a run, as `dir` of tempfile; None: tempfile's default.

    A store is a directory with many small files, which cost nothing in memory.
    """
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
