# SPDX-License-Identifier: Apache-2.0
"""Planted defects: a controller that does something else than it was asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvconform.refimpl.cache.codecs import Quantising
from kvconform.refimpl.cache.controller import Chunks, Controller
from kvconform.refimpl.cache.tiers import Level
from kvconform.refimpl.variants.controlled import Controlled


class _TopOnly(Controller):
    def clear(self, chunks: Chunks) -> None:
        for names in chunks:
            for name in names:
                self.tiers.levels[0].delete(name)


class ClearsTheTop(Controlled):
    """Clears the first level, and leaves the copies in lower ones."""

    controller_kind = _TopOnly


class _Marks(Controller):
    def pin(self, chunks: Chunks) -> None:
        self._pinned |= {names[0]: None for names in chunks}


class PinsOnPaper(Controlled):
    """Notes what is pinned, and evicts by age alone."""

    controller_kind = _Marks


class _Forgets(Controller):
    def unpin(self, chunks: Chunks) -> None:
        self._pinned.clear()


class NeverUnpins(Controlled):
    """Forgets what was pinned when it is unpinned, and keeps the holds."""

    controller_kind = _Forgets


class _First(Controller):
    def move(self, chunks: Chunks, level: str) -> None:
        super().move(chunks[:1], level)


class MovesTheFirst(Controlled):
    """Moves the first of several chunks."""

    controller_kind = _First


class _Strict(Controller):
    def compress(self, chunks: Chunks) -> None:
        lowest = self.tiers.levels[-1]
        missing = [name for names in chunks for name in names if not lowest.exists(name)]
        if missing:
            raise KeyError(missing[0])
        super().compress(chunks)


class RaisesWhenGone(Controlled):
    """Takes a chunk that the last level does not have for an error."""

    controller_kind = _Strict


class _Drops(Controller):
    def move(self, chunks: Chunks, level: str) -> None:
        super().move(chunks, level)
        half = chunks[len(chunks) // 2]
        for name in half:
            self.tiers.levels[self.level_names.index(level)].set(name, b"")


class MovesEmptyValues(Controlled):
    """Moves the key of a chunk, and not its bytes."""

    controller_kind = _Drops


class _Reports(Controller):
    def found(self, chunks: Chunks) -> int:
        return sum(self._is_in(self.tiers.levels[0], names) for names in chunks)

    @staticmethod
    def _is_in(level: Level, names: Sequence[str]) -> bool:
        return all(map(level.exists, names))


class LooksUpTheTop(Controlled):
    """Reports what the first level has, although lookups of the engine find more."""

    controller_kind = _Reports


class _Coarse(Quantising):
    """Halves the number of steps, and says nothing of it."""

    def _grid(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, step = super()._grid(rows)
        return low, step * (2**self.bits - 1) / 7


class CompressesTooMuch(Controlled):
    """Compresses further than the tolerance that it reports allows."""

    smaller = _Coarse(8, 0.01)
