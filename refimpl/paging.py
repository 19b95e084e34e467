# SPDX-License-Identifier: Apache-2.0
"""Between token positions and the paged KV tensors.

A slot is ``block_id * block_size + offset``. A layer's tensor has shape ``[blocks, heads, tokens per block, values]`` (K and V side
by side in ``values``, one head for MLA); its strides are anything, and its blocks may be smaller than the scheduler's (then several
in a row make one). Releases until 0.25 keep K and V on an axis of their own, the first or the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NULL_BLOCK = 0


class Share(NamedTuple):
    """Which tokens of a block a rank has: all, or with decode context parallelism every ``ranks``-th. ``block_size``: tokens per block of
    the scheduler, ``ranks`` times as many as in a rank's memory."""

    block_size: int
    rank: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Share:
        parallel = vllm_config.parallel_config
        ranks = parallel.decode_context_parallel_size
        return cls(vllm_config.cache_config.block_size * ranks, parallel.rank % ranks, ranks)


def slots_of(table: Sequence[int], start: int, end: int, block_size: int) -> tuple[int, ...]:
    """Slots of the positions ``[start, end)``. IndexError when the table is too short: such tokens have no KV."""
    return tuple(
        table[position // block_size] * block_size + position % block_size
        for position in range(start, end)
    )


def blocks_first(layer: torch.Tensor) -> torch.Tensor:
    """A view ``[blocks, heads, tokens per block, ...]`` of a layer's tensor in any of vLLM's layouts."""
    if layer.dim() == 5:
        return layer.permute(1, 3, 2, 0, 4) if layer.shape[0] == 2 else layer.permute(0, 3, 2, 1, 4)
    return layer


def read_slots(layer: torch.Tensor, slots: Sequence[int], share: Share | None = None) -> bytes:
    """Bytes of ``slots``, one row ``[heads, values]`` after the other; zeros where another rank has the token."""
    layer = blocks_first(layer)
    mine, here = _here(slots, share)
    blocks, offsets = _index(layer, here)
    rows = layer[blocks, :, offsets].contiguous()
    if len(here) < len(slots):
        rows = rows.new_zeros(len(slots), *rows.shape[1:]).index_copy_(
            0, mine.to(rows.device), rows
        )
    return rows.view(torch.uint8).cpu().numpy().tobytes()


def write_slots(
    layer: torch.Tensor, slots: Sequence[int], data: bytes, first: int, share: Share | None = None
) -> bool:
    """Copy the rows ``[first, first + len(slots))`` of a chunk into the layer, those of this rank. False, and nothing changes, when the
    chunk has too few of them."""
    layer = blocks_first(layer)
    row = (layer.shape[1], *layer.shape[3:])
    width = math.prod(row) * layer.element_size()
    wanted = data[first * width : (first + len(slots)) * width]
    if len(wanted) != len(slots) * width or len(data) % width:
        return False
    rows = (
        torch.frombuffer(bytearray(wanted), dtype=torch.uint8)
        .view(layer.dtype)
        .view(len(slots), *row)
    )
    mine, here = _here(slots, share)
    blocks, offsets = _index(layer, here)
    layer[blocks, :, offsets] = (rows if len(here) == len(slots) else rows[mine]).to(layer.device)
    return True


def _here(slots: Sequence[int], share: Share | None) -> tuple[torch.Tensor, Sequence[int]]:
    """(indices of the slots that this rank has, where they are in its memory); the indices are empty where it has all."""
    if share is None or share.ranks == 1:
        return torch.empty(0, dtype=torch.long), slots
    mine = [index for index, slot in enumerate(slots) if slot % share.ranks == share.rank]
    return torch.tensor(mine, dtype=torch.long), [slots[index] // share.ranks for index in mine]


def _index(layer: torch.Tensor, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    flat = torch.tensor(slots, dtype=torch.long, device=layer.device)
    return flat // layer.shape[2], flat % layer.shape[2]
