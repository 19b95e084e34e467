# SPDX-License-Identifier: Apache-2.0
"""Holds on chunks that must not be evicted: they are promised to a request, or being read."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable


class Holds:
    """Counts of holds by chunk. May be used by several threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, chunks: Iterable[str], times: int = 1) -> None:
        """Hold the chunks `times` more times."""
        with self._lock:
            for chunk in chunks:
                self._counts[chunk] += times

    def release(self, chunks: Iterable[str]) -> None:
        """Undo one hold of each chunk."""
        with self._lock:
            for chunk in chunks:
                self._counts[chunk] -= 1
                if self._counts[chunk] <= 0:
                    del self._counts[chunk]

    def __contains__(self, chunk: str) -> bool:
        return chunk in self._counts

    def __len__(self) -> int:
        """Return how many holds there are."""
        return sum(self._counts.values())
