# SPDX-License-Identifier: Apache-2.0
"""Rows of slots in plain torch: fetched from a stack of layers, and put into one, in pieces that stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvconform.kernels.paged import Paged, Stack

PIECE = 2 << 20
"""Bytes of cache that are handled at a time."""
WIDE = (torch.complex128, torch.int64, torch.int32, torch.int16)
"""What bytes are copied as, the widest first: torch copies elements one by one when it indexes."""


def pieces(paged: Paged, slots: torch.Tensor) -> Iterator[tuple[Stack, torch.Tensor]]:
    """All of (some layers, indices [k] into `slots` of those that are not padding), together every slot in every layer once; the numbers
    of pieces' layers go on in the order of the cache's. A slot that does not exist is left out."""
    index = ((slots >= 0) & (slots < paged.slots)).nonzero().flatten()
    if not len(index):
        return
    step = max(1, PIECE // paged.slot_bytes)
    deep = max(1, PIECE // (paged.slot_bytes * min(step, len(index))))
    for stack in paged.stacks:
        for layer in range(0, len(stack.numbers), deep):
            layers = Stack(
                stack.bits[layer : layer + deep],
                stack.start + layer,
                stack.numbers[layer : layer + deep],
            )
            for mine in index.split(step):
                yield layers, mine


def wider(*tensors: torch.Tensor, most: int = 16) -> tuple[torch.Tensor, ...]:
    """The tensors with their last axis viewed as fewer, wider elements, as wide as all of them permit, `most` bytes at most. Nothing is
    copied."""
    for dtype in WIDE:
        if dtype.itemsize <= most and all(_permits(tensor, dtype.itemsize) for tensor in tensors):
            return tuple(tensor.view(dtype) for tensor in tensors)
    return tensors


def _permits(tensor: torch.Tensor, width: int) -> bool:
    if tensor.stride(-1) != 1 or width < tensor.element_size():
        return False
    size = tensor.element_size()
    places = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return (
        all(place * size % width == 0 for place in places)
        and tensor.untyped_storage().data_ptr() % width == 0
    )


def split(bits: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots [n] to (blocks, places in the block), for layers `bits` [layers, blocks, heads, block size, sides, dim]."""
    blocks = slots // bits.shape[3]
    return blocks, slots - blocks * bits.shape[3]


def fetch(bits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows [n, layers, heads, sides, dim] of slots [n], a copy; `bits` as of a `Stack`."""
    blocks, places = split(bits, slots)
    (wide,) = wider(bits)
    rows = wide.new_empty(len(slots), wide.shape[0], *wide.shape[2:3], *wide.shape[4:])
    torch.ops.aten.index.Tensor_out(
        wide, [None, blocks, None, places], out=rows
    )  # `wide[...]` would choose an order of its own
    return rows.view(bits.dtype)


def put(bits: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [n, layers, heads, sides, dim] to slots [n]; changes the memory behind `bits`."""
    blocks, places = split(bits, slots)
    wide, values = wider(bits, rows)
    wide[:, blocks, :, places] = values
