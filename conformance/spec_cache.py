# SPDX-License-Identifier: Apache-2.0
"""Parsed files of the specification, kept for the next process in the user's cache directory: never needed, never trusted to be there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from kvconform import yamlio

_CACHE_FORMAT = 1


class Cache:
    """Parsed files by the hash of their text, kept in one JSON file that holds exactly the files of the last load."""

    def __init__(self, enabled: bool) -> None:
        self.path = _cache_path() if enabled else None
        self.old: dict[str, Any] = {}
        self.new: dict[str, Any] = {}
        self.missed = False
        if self.path is not None:
            with contextlib.suppress(OSError, ValueError):
                stored = json.loads(self.path.read_text(encoding="utf-8"))
                if isinstance(stored, dict) and stored.get("format") == _CACHE_FORMAT and isinstance(stored.get("files"), dict):
                    self.old = stored["files"]

    def parse(self, text: str, name: str) -> Any:
        key = hashlib.sha256(text.encode()).hexdigest()
        if key in self.old:
            data = self.old[key]
        else:
            self.missed = True
            data = yamlio.parse(text, name)
        self.new[key] = data
        return data

    def save(self) -> None:
        """Replace the file atomically; a cache that cannot be written is no error."""
        if self.path is None or not self.missed:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"format": _CACHE_FORMAT, "files": self.new}, file)
            os.replace(name, self.path)


def _cache_path() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "kvconform" / "spec.json" if os.path.isabs(base) else None
