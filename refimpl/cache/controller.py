# SPDX-License-Identifier: Apache-2.0
"""Operations on stored chunks that an operator asks for, next to the engine.

A chunk is given by the names of its shards, one per rank; chunks are those of one content, in
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from kvconform.refimpl.cache.chunks import chunk_of
from kvconform.refimpl.cache.codecs import Codec, compressed
from kvconform.refimpl.cache.holds import Holds
from kvconform.refimpl.cache.seal import packed, seal, unpacked, unseal
from kvconform.refimpl.cache.tiers import Level, Tiers

Chunks = Sequence[Sequence[str]]


class Controller:
    """The operations on levels with holds."""

    def __init__(self, tiers: Tiers, holds: Holds, codec: Codec) -> None:
        self.tiers = tiers
        self.holds = holds
        self.codec = codec
        self._pinned: dict[str, None] = {}

    @property
    def level_names(self) -> list[str]:
        """The levels, the fastest first."""
        return [level.name for level in self.tiers.levels]

    def found(self, chunks: Chunks) -> int:
        """Return how many chunks from the first one on are there."""
        return len(list(takewhile(self._is_there, chunks)))

    def _is_there(self, names: Sequence[str]) -> bool:
        return all(map(self.tiers.exists, names))

    def at(self, chunks: Chunks) -> dict[str, int]:
        """Return how many of the chunks each level has, by its name."""
        return {level.name: sum(_has(level, names) for names in chunks) for level in self._levels()}

    def _levels(self) -> Sequence[Level]:
        return self.tiers.levels

    def clear(self, chunks: Chunks) -> None:
        """Forget the chunks, also those that are pinned. StoreError if a level fails."""
        self.unpin(chunks)
        for names in chunks:
            for name in names:
                self.tiers.delete(name)

    def move(self, chunks: Chunks, level: str) -> None:
        """Move the chunks that are there to a level. The last ones stay if it is too small."""
        number = self.level_names.index(level)
        moved: list[str] = []
        try:
            for names in chunks:
                # A lookup needs the first chunks most: no later one takes their place.
                moved.append(chunk_of(names[0]))
                self.holds.take(moved[-1:])
                for name in names:
                    self.tiers.move(name, number)
        finally:
            self.holds.release(moved)

    def pin(self, chunks: Chunks) -> None:
        """Keep the chunks that are there from eviction. Pinning them twice is pinning them once."""
        for names in chunks:
            chunk = chunk_of(names[0])
            if self._is_there(names) and chunk not in self._pinned:
                self._pinned[chunk] = None
                self.holds.take([chunk])

    def unpin(self, chunks: Chunks) -> None:
        """Undo `pin`."""
        for names in chunks:
            chunk = chunk_of(names[0])
            if chunk in self._pinned:
                del self._pinned[chunk]
                self.holds.release([chunk])

    def unpin_all(self) -> None:
        """Undo every `pin`."""
        self.holds.release(self._pinned)
        self._pinned.clear()

    def compress(self, chunks: Chunks) -> None:
        """Replace the chunks, at every level, by a smaller form."""
        for names in chunks:
            for name in names:
                value = self.tiers.peek(name)
                data = None if value is None else unseal(name, value)
                if data is not None:
                    self.tiers.replace(name, seal(name, packed(self._smaller(data))))

    def _smaller(self, data: bytes) -> dict[str, bytes]:
        return {layer: compressed(each, self.codec) for layer, each in unpacked(data).items()}


def _has(level: Level, names: Sequence[str]) -> bool:
    return all(map(level.exists, names))
