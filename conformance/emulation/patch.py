# SPDX-License-Identifier: Apache-2.0
"""Temporary replacement of attributes."""

from __future__ import annotations

from typing import Any

MISSING = object()


class Patches:
    """Replaced attributes of modules and classes, restored in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`; an attribute that `owner` only inherits is hidden, not changed."""
        self._undo.append((owner, name, vars(owner).get(name, MISSING)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Restore everything."""
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
