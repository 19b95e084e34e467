# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's attention on a CPU has the keys of a block.

It packs them for the vector instructions of the machine. So this has vLLM's own operation write
numbered keys, and looks where they are.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from kvconform.refimpl.paging import blocks_first

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EXACT = 256
"""Every data type of a KV cache on a CPU holds the whole numbers up to this one."""


def instructions_of(vllm_config: VllmConfig, layer: str) -> str | None:
    """Return the name of the instruction set that a layer's keys are packed for.

    None if they are not packed: a token's keys are together, before its values.
    """
    attention: Any = vllm_config.compilation_config.static_forward_context.get(layer)
    return getattr(attention, "isa", None)


class Keys:
    """The keys in the KV cache of one layer, block by block, in any layout."""

    def __init__(self, layer: torch.Tensor, instructions: str | None) -> None:
        self._view = blocks_first(layer)
        self._instructions = instructions

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._view.shape[2]

    def read(self, block: int) -> torch.Tensor:
        """Return a copy [tokens, heads, head size] of a block's keys."""
        keys = self._part(block)
        if self._instructions is None:
            return keys.transpose(0, 1).clone()
        heads, tokens, size = keys.shape
        order = packed_order(self._instructions, heads, tokens, size, keys.dtype)
        return keys.reshape(-1)[order].view(tokens, heads, size)

    def write(self, block: int, keys: torch.Tensor) -> None:
        """Replace a block's keys [tokens, heads, head size]."""
        part = self._part(block)
        if self._instructions is None:
            part.copy_(keys.transpose(0, 1))
            return
        order = packed_order(self._instructions, *part.shape, part.dtype)
        packed = torch.empty_like(keys.reshape(-1))
        packed[order] = keys.reshape(-1)
        part.copy_(packed.view(part.shape))

    def _part(self, block: int) -> torch.Tensor:
        """Return a view [heads, tokens, head size] of the memory of a block's keys."""
        whole = self._view[block]
        if whole.dim() == 4:
            return whole[..., 0, :]
        heads, tokens, width = whole.shape
        if self._instructions is None:
            return whole[..., : width // 2]
        # All keys of a head come before its values.
        return whole.view(heads, 2 * tokens, width // 2)[:, :tokens]


@cache
def packed_order(
    instructions: str, heads: int, tokens: int, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return where in a block's memory the keys [tokens, heads, size] are, as a flat index."""
    from vllm._custom_ops import cpu_attn_reshape_and_cache

    shape = tokens, heads, size
    if max(shape) > EXACT:
        raise ValueError(f"keys of the shape {shape} cannot be numbered in {dtype}")
    numbers = torch.zeros(prod(shape), dtype=torch.long)
    for axis, length in enumerate(shape):
        places = torch.arange(length, dtype=dtype).view(*(-1 if n == axis else 1 for n in range(3)))
        numbered = places.expand(shape).contiguous()
        block = torch.zeros(1, heads, 2 * tokens, size, dtype=dtype)
        keys, values = block.chunk(2, dim=2)
        slots = torch.arange(tokens)
        cpu_attn_reshape_and_cache(numbered, numbered, keys, values, slots, instructions)
        numbers = numbers * length + keys.reshape(-1).to(torch.long)
    return numbers.argsort()
