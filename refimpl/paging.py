# SPDX-License-Identifier: Apache-2.0
"""Paged KV tensors: slots of token positions, and copies of slots to and from bytes.

A slot is `block_id * block_size + offset`. A layer's tensor has the shape
`[blocks, heads, tokens per block, values]`, with any strides. K and V are side by side in `values`;
MLA has one head. A block of the scheduler may be several consecutive blocks of the tensor. Until
0.25, vLLM has K and V on an axis of their own, the first or the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

NULL_BLOCK = 0


class Share(NamedTuple):
    """A rank's share of the tokens in a block.

    All of them, or with decode context parallelism one in `ranks` runs of `run` tokens.
    `block_size`: tokens per block of the scheduler, which is `ranks` times the number of tokens per
    block in a rank's memory.
    """

    block_size: int
    rank: int = 0
    ranks: int = 1
    run: int = 1

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Share:
        """Return the share of the configuration's rank."""
        parallel = vllm_config.parallel_config
        ranks = parallel.decode_context_parallel_size
        run = getattr(parallel, "cp_kv_cache_interleave_size", 1)  # older releases have none
        return cls(vllm_config.cache_config.block_size * ranks, parallel.rank % ranks, ranks, run)


def has_window(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether the model's only group has a sliding window.

    Its block table has null blocks where the window has passed.
    """
    [group] = kv_cache_config.kv_cache_groups
    return getattr(group.kv_cache_spec, "sliding_window", None) is not None


def slots_of(table: Sequence[int], start: int, end: int, block_size: int) -> tuple[int, ...]:
    """Return the slots of the positions `[start, end)`.

    IndexError if the table is too short: those tokens have no KV.
    """
    return tuple(
        table[position // block_size] * block_size + position % block_size
        for position in range(start, end)
    )


def blocks_first(layer: torch.Tensor) -> torch.Tensor:
    """Return a view `[blocks, heads, tokens per block, ...]` of a layer in any layout of vLLM."""
    if layer.dim() == 3:  # an MLA layer of the model, which has no axis of heads
        return layer.unsqueeze(1)
    if layer.dim() != 5:
        return layer
    if layer.shape[0] == 2:
        return layer.permute(1, 3, 2, 0, 4)
    return layer.permute(0, 3, 2, 1, 4)


def read_slots(layer: torch.Tensor, slots: Sequence[int], share: Share | None = None) -> bytes:
    """Return the bytes of the slots: one row `[heads, values]` per slot.

    Rows of tokens that another rank has are zero.
    """
    layer = blocks_first(layer)
    mine, here = _here(slots, share)
    blocks, offsets = _index(layer, here)
    rows = layer[blocks, :, offsets].contiguous()
    if len(here) < len(slots):
        all_rows = rows.new_zeros(len(slots), *rows.shape[1:])
        rows = all_rows.index_copy_(0, mine.to(rows.device), rows)
    return rows.view(torch.uint8).cpu().numpy().tobytes()


def write_slots(
    layer: torch.Tensor, slots: Sequence[int], data: bytes, first: int, share: Share | None = None
) -> bool:
    """Copy this rank's part of the rows `[first, first + len(slots))` of a chunk into the layer.

    False, and nothing changed, if the chunk has too few rows.
    """
    layer = blocks_first(layer)
    row = (layer.shape[1], *layer.shape[3:])
    width = math.prod(row) * layer.element_size()
    wanted = data[first * width : (first + len(slots)) * width]
    if len(wanted) != len(slots) * width or len(data) % width:
        return False
    raw = torch.frombuffer(bytearray(wanted), dtype=torch.uint8)
    rows = raw.view(layer.dtype).view(len(slots), *row)
    mine, here = _here(slots, share)
    if len(here) < len(slots):
        rows = rows[mine]
    blocks, offsets = _index(layer, here)
    layer[blocks, :, offsets] = rows.to(layer.device)
    return True


def bytes_in(layer: torch.Tensor, slots: Sequence[int], share: Share | None = None) -> int:
    """Return the bytes of the slots that this rank has."""
    shape = blocks_first(layer).shape
    row = math.prod((shape[1], *shape[3:])) * layer.element_size()
    return len(_here(slots, share)[1]) * row


def _here(slots: Sequence[int], share: Share | None) -> tuple[torch.Tensor, Sequence[int]]:
    """Return (indices of the slots that this rank has, their slots in its memory).

    The indices are empty if the rank has all slots.
    """
    if share is None or share.ranks == 1:
        return torch.empty(0, dtype=torch.long), slots
    run, ranks = share.run, share.ranks
    mine = [index for index, slot in enumerate(slots) if slot // run % ranks == share.rank]
    here = [slots[index] // (run * ranks) * run + slots[index] % run for index in mine]
    return torch.tensor(mine, dtype=torch.long), here


def _index(layer: torch.Tensor, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (blocks, offsets) of the slots in the layer's tensor."""
    flat = torch.tensor(slots, dtype=torch.long, device=layer.device)
    return flat // layer.shape[2], flat % layer.shape[2]
