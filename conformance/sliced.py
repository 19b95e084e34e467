# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache of a rank that holds every n-th token of a block: decode context parallelism.

A block of the scheduler then spans n times the tokens of a block in a rank's memory: position p is on rank p % n. Slots are the
scheduler's, as everywhere in the harness; this class alone knows where in its rank's memory they are, if they are there at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvconform.groups import Group
from kvconform.kernels.codes import CodeBook
from kvconform.kvcache import PagedCache


class SlicedCache(PagedCache):
    """The share of rank `rank` of `ranks`. Writes to slots of other ranks are dropped, and they are never found wrong. `block_size` is the
    scheduler's; ValueError if it cannot be split."""

    def __init__(self, book: CodeBook, num_blocks: int, block_size: int, rank: int, ranks: int, **kwargs: Any) -> None:
        if block_size % ranks:
            raise ValueError(f"blocks of {block_size} tokens cannot be split over {ranks} ranks")
        self.share = (rank, ranks)
        super().__init__(book, num_blocks, block_size, **kwargs)

    @property
    def registered(self) -> tuple[Group, ...]:
        return tuple(replace(group, block_size=group.block_size // self.share[1]) for group in self.groups)

    def _layers(self, pages: torch.Tensor, depth: int, group: Group, layout: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        mine = replace(group, block_size=group.block_size // self.share[1])
        return super()._layers(pages[: pages.numel() // self.share[1]], depth, mine, layout)

    def _mine(self, slots: np.ndarray) -> np.ndarray:
        """Indices of the slots that this rank holds."""
        rank, ranks = self.share
        return np.flatnonzero(slots % self.stride % ranks == rank)

    def split(self, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, offsets = super().split(slots)
        return blocks, offsets // self.share[1]

    def mapping(self, slots: np.ndarray, group: Group) -> np.ndarray:
        rank, ranks = self.share
        here = slots // self.stride * (group.block_size // ranks) + slots % self.stride // ranks
        return np.where(slots % self.stride % ranks == rank, here, -1)

    def write(self, layer: int, slots: np.ndarray, rows: np.ndarray) -> None:
        mine = self._mine(slots)
        super().write(layer, slots[mine], rows[mine])

    def peek(self, layer: int, slots: np.ndarray) -> torch.Tensor:
        return super().peek(layer, slots[self._mine(slots)])

    def poke(self, layer: int, slots: np.ndarray, values: torch.Tensor) -> None:
        super().poke(layer, slots[self._mine(slots)], values)

    def differing(self, layer: int, slots: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        mine = self._mine(slots)
        found = super().differing(layer, slots[mine], rows[mine])
        return torch.zeros(len(slots), dtype=torch.bool, device=found.device).index_copy_(0, self._upload(torch.from_numpy(mine)), found)

    def changed_slots(self, touched: torch.Tensor | None) -> np.ndarray:
        (rank, ranks), slots = self.share, super().changed_slots(touched)
        return slots // self.stride * self.stride + slots % self.stride * ranks + rank
