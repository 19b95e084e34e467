# SPDX-License-Identifier: Apache-2.0
"""Whether the files that a process has imported are still those that lie there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import kvconform

State = tuple[int, int]
"""Time of the last change (ns) and size (bytes) of a file."""
DATA = ("spec", "connectors")
"""Folders of kvconform with data that a process reads once."""
KINDS = (".yaml", ".toml", ".json")


class Imported:
    """The files of all modules of this process, and kvconform's data, as they are now."""

    def __init__(self) -> None:
        self._files = {name: _state(name) for name in (*_modules(), *_data())}

    def changed(self) -> str | None:
        """Return a file that was changed, added or deleted since; None if there is none."""
        for name, before in self._files.items():
            if _state(name) != before:
                return name
        return next((name for name in _data() if name not in self._files), None)


def _state(name: str) -> State | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _modules() -> list[str]:
    found = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted({name for name in found if isinstance(name, str)})


def _data() -> list[str]:
    root = Path(kvconform.__path__[0])
    return [
        os.path.join(folder, name)
        for part in DATA
        for folder, _, names in os.walk(root / part)
        for name in sorted(names)
        if name.endswith(KINDS)
    ]
