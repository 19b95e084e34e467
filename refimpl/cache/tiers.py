# SPDX-License-Identifier: Apache-2.0
"""Levels of back ends with bounds, from the fastest to the lowest, which are one back end together.

- A lookup and a read fall through to the first level that has the value.
- A value read from a lower level is promoted: it is copied to the top level.
- A value that has to leave a full level is demoted: it moves to the next level, if no lower one has
  it. A value that leaves the lowest level is lost.
- What must stay is never evicted. If nothing else can go, a new value is stored further down.
- A stored value takes the place of earlier ones at every level.
- A level that fails is passed over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvconform.refimpl.cache.backend import Backend, Full, StoreError
from kvconform.refimpl.cache.eviction import Evictor, Lru


@dataclass
class Counts:
    """What happened at one level so far; bytes are those of stored values."""

    hits: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    promoted: int = 0
    evicted: int = 0


@dataclass
class Level:
    """One back end, and how many values it may hold (None: any number)."""

    name: str
    backend: Backend
    bound: int | None = None
    entries: Evictor = field(default_factory=Lru)
    counts: Counts = field(default_factory=Counts)

    def adopt(self, prefix: str) -> None:
        """Take over the values that the back end has already: those of an earlier process."""
        for key in sorted(self.stored(prefix)):
            self.entries.used(key)

    def stored(self, prefix: str = "") -> list[str]:
        """Return the keys in the back end; none if it fails."""
        with suppress(StoreError):
            return [*self.backend.list(prefix)]
        return []

    def exists(self, key: str) -> bool:
        with suppress(StoreError):
            return self.backend.exists(key)
        return False

    def get(self, key: str) -> bytes | None:
        """Return the value; None if it is gone or the level fails."""
        with suppress(StoreError):
            value = self.backend.get(key)
            if value is None:
                self.entries.removed(key)  # otherwise it would count as an entry
            else:
                self.entries.used(key)
            return value
        return None

    def set(self, key: str, value: bytes) -> None:
        self.backend.set(key, value)
        self.entries.used(key)
        self.counts.bytes_written += len(value)

    def delete(self, key: str) -> None:
        self.backend.delete(key)
        self.entries.removed(key)

    def has_room(self, key: str) -> bool:
        return self.bound is None or key in self.entries or len(self.entries) < self.bound


class Tiers:
    """A back end of several levels. `must_stay`: whether a value must not be evicted now.

    `prefix`: start of the keys that the levels are bounded for.
    """

    def __init__(
        self, levels: Sequence[Level], must_stay: Callable[[str], bool], prefix: str = ""
    ) -> None:
        self.levels = levels
        self.misses = 0
        self.lost = 0
        """Values that no level took, or that left the lowest one."""
        self._must_stay = must_stay
        self._lock = threading.RLock()
        for level in levels:
            level.adopt(prefix)
        self._trim()

    def exists(self, key: str) -> bool:
        return any(level.exists(key) for level in self.levels)

    def get(self, key: str) -> bytes | None:
        with self._lock:
            for number, level in enumerate(self.levels):
                value = level.get(key)
                if value is not None:
                    level.counts.hits += 1
                    level.counts.bytes_read += len(value)
                    if number > 0:
                        self._promote(key, value)
                    self._trim()
                    return value
            self.misses += 1
            return None

    def peek(self, key: str) -> bytes | None:
        """Return the value, and leave it where it is."""
        with self._lock:
            return next((value for level in self.levels if (value := level.get(key))), None)

    def _promote(self, key: str, value: bytes) -> None:
        with suppress(StoreError):
            if self._store(0, key, value):
                self.levels[0].counts.promoted += 1

    def _trim(self) -> None:
        """Evict what is beyond the bounds: values of other engines, or of an earlier one."""
        for number, level in enumerate(self.levels):
            if level.bound is not None and len(level.entries) > level.bound:
                with suppress(StoreError):
                    self._shrink(number, level.bound)

    def set(self, key: str, value: bytes) -> None:
        """Store a value. StoreError if no level takes it, or an earlier one cannot be replaced."""
        with self._lock:
            taken = self._place(key, value, 0)
            if taken is None:
                raise StoreError("no level takes the value")
            self._replace_others(key, value, taken)

    def _replace_others(self, key: str, value: bytes, taken: int) -> None:
        """Replace earlier values of a key at the levels that did not take the new one.

        A lower copy is overwritten, not removed: another engine may be about to read it. A copy
        above is removed, because that level has no room for the new value, or fails.
        """
        for number, level in enumerate(self.levels):
            if number == taken or not level.exists(key):
                continue
            if number < taken:
                level.delete(key)
                continue
            try:
                level.set(key, value)
            except StoreError:
                level.delete(key)
        self._trim()

    def _place(self, key: str, value: bytes, first: int) -> int | None:
        """Store a value at the first level from `first` on that takes it; return its number.

        None if no level did. The levels above are done with the value.
        """
        for number in range(first, len(self.levels)):
            with suppress(StoreError):
                if self._store(number, key, value):
                    return number
        self.lost += 1
        return None

    def _store(self, number: int, key: str, value: bytes) -> bool:
        """Store a value at a level, and evict others for it; return whether it is there.

        StoreError if the level fails: then nothing more is evicted.
        """
        if not self._make_room(number, key):
            return False
        while True:
            try:
                self.levels[number].set(key, value)
                return True
            except Full:  # in bytes
                if not self._evict(number, besides=key):
                    return False

    def _make_room(self, number: int, key: str) -> bool:
        """Evict until the level can take a value of this key; return whether it can."""
        level = self.levels[number]
        if level.has_room(key):
            return True
        assert level.bound is not None
        return level.bound > 0 and self._shrink(number, level.bound - 1)

    def _shrink(self, number: int, count: int) -> bool:
        """Evict until the level has `count` values; return whether it has."""
        while len(self.levels[number].entries) > count:
            if not self._evict(number):
                return False
        return True

    def _evict(self, number: int, besides: str | None = None) -> bool:
        """Evict one value of a level, not that of the key `besides`; return whether one went."""
        level = self.levels[number]
        victim = level.entries.victim(lambda key: key == besides or self._must_stay(key))
        if victim is None:
            return False
        self._demote(number, victim)
        level.delete(victim)
        level.counts.evicted += 1
        return True

    def _demote(self, number: int, key: str) -> None:
        """Copy a value that is to leave a level to the next one, unless a lower one has it."""
        below = self.levels[number + 1 :]
        if any(level.exists(key) for level in below):
            return
        value = self.levels[number].get(key)
        if value is not None:
            self._place(key, value, number + 1)

    def move(self, key: str, number: int) -> bool:
        """Move a value to a level, and remove it from the others; return whether it is there.

        Values may have to leave that level for it.
        """
        with self._lock:
            value = self.peek(key)
            target = self.levels[number]
            try:
                if value is None or not self._store(number, key, value):
                    return False
                for level in self.levels:
                    if level is not target:
                        level.delete(key)
            except StoreError:
                return False
            return True

    def replace(self, key: str, value: bytes) -> None:
        """Store a value at every level that has one of this key."""
        with self._lock:
            for level in self.levels:
                if level.exists(key):
                    with suppress(StoreError):
                        level.set(key, value)

    def list(self, prefix: str = "") -> Iterator[str]:
        found: dict[str, None] = {}
        for level in self.levels:
            found |= dict.fromkeys(level.stored(prefix))
        return iter(found)

    def delete(self, key: str) -> None:
        """Remove a value from all levels. StoreError if one of them fails."""
        with self._lock:
            failed = None
            for level in self.levels:
                try:
                    level.delete(key)
                except StoreError as error:
                    failed = error
            if failed is not None:
                raise failed

    def flush(self) -> None:
        """Copy to the lowest level what only the others have, so that it outlives the process.

        A level that is full of other values keeps them.
        """
        lowest = self.levels[-1]
        with self._lock, suppress(StoreError):
            for level in self.levels[:-1]:
                for key in level.stored():
                    if not lowest.has_room(key) or lowest.exists(key):
                        continue
                    value = level.get(key)
                    if value is not None:  # lost meanwhile
                        lowest.set(key, value)

    def close(self) -> None:
        for level in self.levels:
            level.backend.close()
