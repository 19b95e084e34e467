# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half tells the worker half: plain, frozen, picklable; nothing in it belongs to the engine or changes later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvconform.refimpl.paging import slots_of


@dataclass(frozen=True)
class Piece:
    """Part of one chunk: its rows ``[first, first + len(slots))`` and the slots that hold them."""

    key: str
    first: int
    slots: tuple[int, ...]

    def blocks(self, block_size: int) -> set[int]:
        return {slot // block_size for slot in self.slots}


def cut(
    keys: Sequence[str], table: Sequence[int], start: int, end: int, chunk: int, block_size: int
) -> tuple[Piece, ...]:
    """The positions ``[start, end)``, cut at chunk boundaries. ``keys``: of all chunks from position 0; ``table``: block ids from
    position 0."""
    cuts = [max(start, index * chunk) for index in range(start // chunk, -(-end // chunk))] + [end]
    spans = [(low, high) for low, high in pairwise(cuts) if low < high]
    return tuple(
        Piece(keys[low // chunk], low % chunk, slots_of(table, low, high, block_size))
        for low, high in spans
    )


@dataclass(frozen=True)
class Load:
    """Fill the positions ``[start, end)`` of a request: exactly the tokens that the engine granted."""

    req: str
    start: int
    end: int
    pieces: tuple[Piece, ...]
    is_async: bool


@dataclass(frozen=True)
class Save:
    """Store whole chunks of the positions ``[start, end)`` of a request once this step's forward pass is over.

    ``table``: the blocks that the saved KV depends on. ``final``: the request is over, its blocks are kept for this save alone, and
    its completion must be reported. ``counters``: C, S, N and P of the request when this was planned; for diagnosis.
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
    """One step's plan. ``dropped``: requests that lost their blocks, so their unfinished saves are void. ``repaired``: blocks whose
    failed load the engine has taken note of; from this step on it recomputes them."""

    epoch: int
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    dropped: frozenset[str] = frozenset()
    repaired: frozenset[int] = frozenset()
