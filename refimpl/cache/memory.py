# SPDX-License-Identifier: Apache-2.0
"""Values in the memory of this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar


class MemoryBackend:
    """A dictionary. Back ends of the same name share it, so halves and ranks find each other.

    One without a name has its own.
    """

    named: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(self, name: str = "") -> None:
        self._values: dict[str, bytes] = self.named.setdefault(name, {}) if name else {}

    def exists(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def list(self, prefix: str = "") -> Iterator[str]:
        return iter([key for key in list(self._values) if key.startswith(prefix)])

    def delete(self, key: str) -> None:
        self._values.pop(key, None)

    def close(self) -> None:
        """Keep the values: another back end may have the same name."""
