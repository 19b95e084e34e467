# SPDX-License-Identifier: Apache-2.0
"""Metadata of a step: the loads and saves that the scheduler half plans for the worker half.

It is frozen and picklable. Nothing in it belongs to the engine or changes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvconform.refimpl.paging import slots_of


@dataclass(frozen=True)
class Piece:
    """Part of one chunk: its rows `[first, first + len(slots))` and the slots that hold them."""

    key: str
    first: int
    slots: tuple[int, ...]

    def blocks(self, block_size: int) -> set[int]:
        """Return the ids of the blocks that the slots are in."""
        return {slot // block_size for slot in self.slots}


def cut(
    keys: Sequence[str], table: Sequence[int], start: int, end: int, chunk: int, block_size: int
) -> tuple[Piece, ...]:
    """Return the positions `[start, end)`, cut at chunk boundaries.

    `keys` and `table` are the request's chunk keys and block ids, from position 0.
    """
    cuts = [max(start, index * chunk) for index in range(start // chunk, -(-end // chunk))]
    cuts.append(end)
    spans = [(low, high) for low, high in pairwise(cuts) if low < high]
    return tuple(
        Piece(keys[low // chunk], low % chunk, slots_of(table, low, high, block_size))
        for low, high in spans
    )


@dataclass(frozen=True)
class Load:
    """A load of the positions `[start, end)`: exactly the tokens that the engine granted."""

    req: str
    start: int
    end: int
    pieces: tuple[Piece, ...]
    is_async: bool


@dataclass(frozen=True)
class Save:
    """A save of the whole chunks in the positions `[start, end)`, after the step's forward pass.

    `table`: the blocks that the saved KV depends on. `final`: the request is finished, its blocks
    are kept only for this save, and the completion must be reported. `counters`: the request's
    computed, scheduled, known and placeholder tokens when the save was planned, for diagnosis.
    """

    req: str
    start: int
    end: int
    pieces: tuple[Piece, ...]
    table: tuple[int, ...]
    final: bool
    counters: tuple[int, int, int, int]


@dataclass(frozen=True)
class ReferenceMetadata(KVConnectorMetadata):
    """The plan of one step.

    `epoch`: the store's epoch at planning. `dropped`: requests that lost their blocks; their
    unfinished saves are void. `repaired`: blocks whose failed load the engine has acknowledged;
    from this step on, it recomputes them.
    """

    epoch: int
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    dropped: frozenset[str] = frozenset()
    repaired: frozenset[int] = frozenset()
