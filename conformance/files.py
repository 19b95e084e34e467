# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all, and where many small ones go."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, data: str | bytes) -> None:
    """Write a file (text as UTF-8); readers see the old one or the new one, never half of it. OSError if that cannot be."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)
    os.replace(scratch, path)


def scratch_root() -> str | None:
    """Where stores of a run go, as `dir` of tempfile: they are directories with many small files, and in memory these cost nothing."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
