# SPDX-License-Identifier: Apache-2.0
"""Grants: what the engine allowed a connector to load, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from kvconform.groups import Group


@dataclass
class Grant:
    """One load that the engine granted: positions [start, end) of a request go to `slots` [layers, end - start], -1 where a layer wants
    none: its table has the null block there, its group is not transferred, or another rank holds the token (`share`: PagedCache's).

    `tables` are the request's whole block tables at the grant, one per group, `shared` its blocks before the grant. `written[layer]` marks
    positions that the connector wrote, `late` (layer, position) that the engine read before. A grant is open from the allocation until
    the engine relied on it (or it failed); `due` is the load.due event of one that was incomplete then and said nothing. `failed` are the
    blocks that were reported so far, which may be steps before it is due; `given_up` means that the request was reported as a whole.
    """

    transfer: str
    req: str
    generation: int
    start: int
    end: int
    is_async: bool
    tables: Sequence[list[int]]
    groups: Sequence[Group]
    share: tuple[int, int] = (0, 1)
    open: bool = True
    started_step: int = 0
    late: set[tuple[int, int]] = field(default_factory=set)
    due: dict[str, Any] | None = None
    failed: set[int] = field(default_factory=set)
    given_up: bool = False
    written: np.ndarray = field(init=False)
    slots: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.stride = max(group.block_size for group in self.groups)
        self.slots = np.full((sum(len(g.layers) for g in self.groups), max(0, self.end - self.start)), -1, dtype=np.int64)
        for group, table in zip(self.groups, self.tables, strict=True):
            if group.transfer:
                found = slots_of(table, self.start, self.end, group.block_size, self.stride)
                if group.recurrent:  # the last state is all there is
                    found = np.where(np.arange(self.start, self.end) == self.end - 1, found - found % self.stride, -1)
                found = np.where(np.arange(self.start, self.end) % self.share[1] == self.share[0], found, -1)
                self.slots[list(group.layers)] = found if group.window is None else np.where(found < self.stride, -1, found)
        self.written = self.slots < 0

    @property
    def key(self) -> tuple[str, int]:
        return self.req, self.generation

    @cached_property
    def table(self) -> set[int]:
        """Block ids of the request, of whatever group."""
        return set().union(*self.tables)

    @cached_property
    def shared(self) -> set[int]:
        """Block ids before the grant: the local prefix-cache hit."""
        return {block for group, table in zip(self.groups, self.tables, strict=True) for block in table[: self.start // group.block_size]}

    @cached_property
    def blocks(self) -> set[int]:
        """Block ids that the grant covers, whole or in part."""
        return {int(slot) // self.stride for slot in np.unique(self.slots) if slot >= 0}

    @cached_property
    def kept_back(self) -> set[int]:
        """Block ids of groups that are not transferred."""
        return {block for group, table in zip(self.groups, self.tables, strict=True) if not group.transfer for block in table}

    def position(self, layer: int, slot: int) -> int | None:
        """Request position of `slot` if the grant covers it in this layer."""
        hit = np.nonzero(self.slots[layer] == slot)[0]
        return self.start + int(hit[0]) if len(hit) else None

    def awaits(self, layer: int, slot: int) -> bool:
        """Whether the connector still owes (or may still write) the bytes of `slot`."""
        pos = self.position(layer, slot)
        return pos is not None and (self.open or self.due is not None and pos in self.due["missing"])

    def missing(self) -> list[int]:
        """Positions that some layer wants and never received."""
        return [self.start + int(i) for i in np.nonzero(~self.written.all(0))[0]]

    def missing_by_group(self) -> list[list[Any]]:
        """The same for each of several groups that lacks something: [number, tokens per block, positions, its block table]."""
        found = []
        for number, (group, table) in enumerate(zip(self.groups, self.tables, strict=True)):
            positions = [self.start + int(i) for i in np.nonzero(~self.written[list(group.layers)].all(0))[0]]
            if positions and len(self.groups) > 1:
                found.append([number, group.block_size, positions, list(table)])
        return found

    def lacking(self) -> set[int]:
        """Block ids in which something is missing."""
        return {int(slot) // self.stride for slot in self.slots[~self.written]}


def slots_of(table: Sequence[int], start: int, end: int, block_size: int, stride: int | None = None) -> np.ndarray:
    """Slots of positions [start, end) through a block table; raises IndexError when the table is too short."""
    positions = np.arange(max(start, 0), end)
    if len(positions) and positions[-1] // block_size >= len(table):
        raise IndexError(f"block table of {len(table)} blocks of {block_size} does not reach position {int(positions[-1])}")
    blocks = np.array(table, dtype=np.int64)
    return blocks[positions // block_size] * (stride or block_size) + positions % block_size
