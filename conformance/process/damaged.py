# SPDX-License-Identifier: Apache-2.0
"""Damage to files. A file is replaced by a damaged one: a process that has it open keeps it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_FLIP = bytes(255 - byte for byte in range(256))

DAMAGED: dict[str, Callable[[bytes], bytes | None]] = {
    "removed": lambda data: None,
    "truncated": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\xa5" * 64,
    "garbage": lambda data: data.translate(_FLIP),
}
"""What becomes of a file's content, by kind of damage; None: the file is removed."""


def damage_files(folder: Path, how: str) -> int:
    """Damage every regular file below `folder` that is not empty; return their number."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    count = 0
    for path in files:
        data = path.read_bytes()
        damaged = DAMAGED[how](data)
        if not data and how != "removed":
            continue
        count += 1
        if damaged is None:
            path.unlink()
            continue
        other = path.with_name(f"{path.name}.damaged")
        other.write_bytes(damaged)
        os.chmod(other, path.stat().st_mode & 0o7777)
        os.replace(other, path)
    return count
