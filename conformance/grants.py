# SPDX-License-Identifier: Apache-2.0
"""Grants: what the engine allowed a connector to load, and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Grant:
    """One load that the engine granted: positions [start, end) of a request go to `slots` [end - start].

    `table` is the request's whole block table at the grant, `shared` its blocks before the grant. `written[layer]` marks positions
    that the connector wrote, `late` (layer, position) that the engine read before. A grant is open from the allocation until the engine
    relied on it (or it failed); `due` is the load.due event of one that was incomplete then and said nothing.
    """

    transfer: str
    req: str
    generation: int
    start: int
    end: int
    is_async: bool
    table: list[int]
    block_size: int
    layers: int
    open: bool = True
    started_step: int = 0
    late: set[tuple[int, int]] = field(default_factory=set)
    due: dict[str, Any] | None = None
    written: np.ndarray = field(init=False)
    slots: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.slots = slots_of(self.table, self.start, self.end, self.block_size)
        self.written = np.zeros((self.layers, max(0, self.end - self.start)), dtype=bool)

    @property
    def key(self) -> tuple[str, int]:
        return self.req, self.generation

    @property
    def shared(self) -> set[int]:
        """Block ids before the grant: the local prefix-cache hit."""
        return set(self.table[: self.start // self.block_size])

    @property
    def blocks(self) -> set[int]:
        """Block ids that the grant covers, whole or in part."""
        return set(self.table[self.start // self.block_size : -(-self.end // self.block_size)])

    def position(self, slot: int) -> int | None:
        """Request position of `slot` if the grant covers it."""
        hit = np.nonzero(self.slots == slot)[0]
        return self.start + int(hit[0]) if len(hit) else None

    def awaits(self, slot: int) -> bool:
        """Whether the connector still owes (or may still write) the bytes of `slot`."""
        pos = self.position(slot)
        return pos is not None and (self.open or self.due is not None and pos in self.due["missing"])

    def missing(self) -> list[int]:
        """Positions that some layer never received."""
        return [self.start + int(i) for i in np.nonzero(~self.written.all(0))[0]]


def slots_of(table: list[int], start: int, end: int, block_size: int) -> np.ndarray:
    """Slots of positions [start, end) through a block table; raises IndexError when the table is too short."""
    positions = np.arange(max(start, 0), end)
    if len(positions) and positions[-1] // block_size >= len(table):
        raise IndexError(f"block table of {len(table)} blocks of {block_size} does not reach position {int(positions[-1])}")
    blocks = np.array(table, dtype=np.int64)
    return blocks[positions // block_size] * block_size + positions % block_size
