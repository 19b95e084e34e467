# SPDX-License-Identifier: Apache-2.0
"""Poison: codes in blocks that reveal bytes which were neither loaded nor computed."""

from __future__ import annotations

import torch

from kvconform.kernels.device import choose
from kvconform.kernels.paged import Paged
from kvconform.kernels.write import write_torch, write_triton


def poison(
    paged: Paged,
    blocks: torch.Tensor,
    content: torch.Tensor,
    nonce: int = 0,
    backend: str | None = None,
) -> None:
    """Fill all slots of blocks [n] int64, in all layers, with the code of each block's content.

    `content`: [n] int64 or uint64. Negative blocks are padding and are skipped. Changes only the
    cache. The kernel, the errors, and the behaviour on CUDA are those of `write.write`.
    """
    blocks = paged.check_blocks(blocks)
    content = paged.check_content(content, len(blocks))
    if choose(paged.device, backend):
        write_triton(paged, blocks, content, nonce, blocks=True)
    else:
        write_torch(paged, slots_in(paged, blocks), content.repeat_interleave(paged.size), nonce)


def slots_in(paged: Paged, blocks: torch.Tensor) -> torch.Tensor:
    """Return all slots [n * size] of blocks [n]; -1 for those of negative blocks."""
    slots = blocks[:, None] * paged.size + torch.arange(paged.size, device=blocks.device)
    return torch.where(blocks[:, None] < 0, -1, slots).flatten()
