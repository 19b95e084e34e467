# SPDX-License-Identifier: Apache-2.0
"""Damage to files. A file is replaced by a damaged one: a process that has it open keeps it."""

from __future__ import annotations

import contextlib
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


OTHER = ".kvconform-damaged"
"""Name of a damaged file before it takes the place of the sound one, whose name may be long."""


def damage_files(folder: Path, how: str, every: int = 1) -> int:
    """Damage every regular file below `folder`, or one in `every`; return how many were damaged.

    Files are in the order of their paths. An empty file can only be removed.
    """
    # A thread of the connector's may remove files and directories meanwhile.
    files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    count = 0
    for path in sorted(files)[every - 1 :: every]:
        with contextlib.suppress(FileNotFoundError):
            count += _damage(path, how)
    return count


def _damage(path: Path, how: str) -> bool:
    """Damage a file; return whether it was. A link never is."""
    if path.is_symlink() or not path.is_file():
        return False
    data = path.read_bytes()
    damaged = DAMAGED[how](data)
    if damaged is None:
        path.unlink()
        return True
    if data:
        other = path.with_name(OTHER)
        other.write_bytes(damaged)
        os.chmod(other, path.stat().st_mode & 0o7777)
        os.replace(other, path)
    return bool(data)
