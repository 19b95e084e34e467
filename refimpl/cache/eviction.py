# SPDX-License-Identifier: Apache-2.0
"""Evictors: they know the entries of a level, and choose the one that goes when it is full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol


class Evictor(Protocol):
    """The entries of one level."""

    def used(self, key: str) -> None:
        """Note that an entry was stored or read."""

    def removed(self, key: str) -> None:
        """Forget an entry, if it is known."""

    def victim(self, must_stay: Callable[[str], bool]) -> str | None:
        """Return the entry that goes next; None if all must stay."""

    def __contains__(self, key: str) -> bool:
        """Return whether an entry is known."""

    def __len__(self) -> int:
        """Return how many entries are known."""


class Lru:
    """The least recently used entry goes."""

    def __init__(self) -> None:
        self._order: dict[str, None] = {}

    def used(self, key: str) -> None:
        self._order.pop(key, None)
        self._order[key] = None

    def removed(self, key: str) -> None:
        self._order.pop(key, None)

    def victim(self, must_stay: Callable[[str], bool]) -> str | None:
        return next((key for key in self._order if not must_stay(key)), None)

    def __contains__(self, key: str) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)


class Lfu(Lru):
    """The least frequently used entry goes, and of equals the least recently used."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter[str] = Counter()

    def used(self, key: str) -> None:
        super().used(key)
        self._uses[key] += 1

    def removed(self, key: str) -> None:
        super().removed(key)
        del self._uses[key]

    def victim(self, must_stay: Callable[[str], bool]) -> str | None:
        # `min` returns the first of equals, which is the least recently used one.
        free = (key for key in self._order if not must_stay(key))
        return min(free, key=lambda key: self._uses[key], default=None)


EVICTORS: dict[str, type[Lru]] = {"lru": Lru, "lfu": Lfu}
