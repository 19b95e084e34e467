# SPDX-License-Identifier: Apache-2.0
"""Rows of slots in plain torch: read and written in pieces that fit the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvconform.kernels.paged import Paged, Stack
from kvconform.kernels.wide import wider

PIECE = 2 << 20
"""Bytes of cache that are processed at a time."""


def pieces(paged: Paged, slots: torch.Tensor) -> Iterator[tuple[Stack, torch.Tensor]]:
    """Yield pieces (layers, indices [k] into `slots`) that cover every slot in every layer once.

    Layers come in the order of the cache. Padding and slots that do not exist are left out.
    """
    index = ((slots >= 0) & (slots < paged.slots)).nonzero().flatten()
    if not len(index):
        return
    step = max(1, PIECE // paged.slot_bytes)
    deep = max(1, PIECE // (paged.slot_bytes * min(step, len(index))))
    for stack in paged.stacks:
        for layer in range(0, len(stack.firsts), deep):
            layers = Stack(
                stack.bits[layer : layer + deep],
                stack.start + layer,
                stack.firsts[layer : layer + deep],
            )
            for mine in index.split(step):
                yield layers, mine


def split(bits: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert slots [n] to (blocks, places in the block).

    `bits`: layers [layers, blocks, heads, block size, sides, dim].
    """
    blocks = slots // bits.shape[3]
    return blocks, slots - blocks * bits.shape[3]


def fetch(bits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return a copy of the rows [n, layers, heads, sides, dim] of slots [n].

    `bits`: of a `Stack`.
    """
    blocks, places = split(bits, slots)
    (wide,) = wider(bits)
    rows = wide.new_empty(len(slots), wide.shape[0], *wide.shape[2:3], *wide.shape[4:])
    # `wide[...]` would choose another order of axes.
    torch.ops.aten.index.Tensor_out(wide, [None, blocks, None, places], out=rows)
    return rows.view(bits.dtype)


def put(bits: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [n, layers, heads, sides, dim] to slots [n]; changes the memory of `bits`."""
    blocks, places = split(bits, slots)
    wide, values = wider(bits, rows)
    wide[:, blocks, :, places] = values
