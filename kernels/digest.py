# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Digests of blocks: one 64-bit number per block, layer and K or V, independent of the layout.

The bytes of a head's K or V in one slot are a row of little-endian 64-bit words, the last padded
with zeros. The digest is mix64 of the sum, modulo 2^64, of word times weight over all words of the
block. The weight of word `j` of slot `n` of head `h` is mix64((h * size + n) * words + j + 1) with
its lowest bit set. Weights are odd, so a change of one word always changes the digest.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kvconform.kernels.device import choose, mix, on, start, tl, triton
from kvconform.kernels.lanes import mix64
from kvconform.kernels.paged import Paged
from kvconform.kernels.rows import PIECE
from kvconform.kernels.wide import wider

WORD = 8
"""Bytes of a word."""


def digest(
    paged: Paged, blocks: torch.Tensor | None = None, backend: str | None = None
) -> torch.Tensor:
    """Return digests [n, layers, sides] int64 of blocks [n] int64, or of all blocks.

    They are the bits of unsigned numbers. Digests of padding (negative blocks) are 0. Changes
    nothing. ValueError for ids of another shape, dtype or device, and on the CPU for a block beyond
    the last. On CUDA the digest of such a block is 0, and the host does not wait: there is one
    launch for all layers of the same strides.
    """
    if blocks is None:
        blocks = torch.arange(paged.blocks, device=paged.device)
    blocks = paged.check_blocks(blocks)
    out = torch.zeros(
        len(blocks), len(paged.numbers), paged.sides, dtype=torch.int64, device=paged.device
    )
    (digest_triton if choose(paged.device, backend) else digest_torch)(paged, blocks, out)
    return out


@lru_cache(maxsize=16)
def weights(heads: int, size: int, words: int, device: torch.device) -> torch.Tensor:
    """Return the weights [heads, size, words] int64."""
    numbers = torch.arange(1, heads * size * words + 1, device=device)
    return (mix64(numbers) | 1).view(heads, size, words)


def digest_torch(paged: Paged, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Compute `digest` in plain torch, for checked arguments."""
    index = ((blocks >= 0) & (blocks < paged.blocks)).nonzero().flatten()
    row = paged.dim * paged.itemsize
    weight = weights(paged.heads, paged.size, -(-row // WORD), paged.device)
    step = max(1, PIECE // (paged.slot_bytes * paged.size))
    for stack in paged.stacks:
        (wide,) = wider(stack.bits)
        for place, layer in enumerate(wide, stack.start):
            for mine in index.split(step):
                rows = layer[blocks[mine]]  # [n, heads, size, sides, ...]
                rest = rows.flatten().view(torch.uint8).view(*rows.shape[:-1], row)
                if row % WORD:
                    rest = torch.nn.functional.pad(rest, (0, -row % WORD))
                words = rest.flatten().view(torch.int64).view(*rows.shape[:-1], weight.shape[-1])
                out[mine, place] = mix64((words * weight[:, :, None]).sum((1, 2, 4)))


def digest_triton(paged: Paged, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Compute `digest` with the Triton kernel, for checked arguments."""
    if not len(blocks):
        return
    words = -(-paged.dim * paged.itemsize // WORD)
    with on(paged.device):
        for launch in paged.launches:
            wide = launch.words.bits
            lanes = 1 << (wide.shape[-1] - 1).bit_length()
            lanes = min(lanes, 512 // wide.element_size())
            slots = 1 << (paged.size - 1).bit_length()
            tile = max(1, min(slots, 8192 // (lanes * wide.element_size())))
            start(
                digest_kernel,
                (len(blocks) * paged.sides, launch.layers),
                (wide, launch.where, blocks, out),
                (paged.blocks, paged.heads, len(paged.numbers), launch.start),
                (
                    *launch.words.strides,
                    wide.shape[-1],
                    words,
                    launch.words.pack,
                    wide.element_size(),
                    paged.sides,
                    paged.size,
                    tile,
                    lanes,
                ),
            )


@triton.jit(do_not_specialize=["limit", "heads", "layers", "before"])
def digest_kernel(
    cache,
    where,
    blocks,
    out,
    limit,
    heads,
    layers,
    before,
    block_stride,
    head_stride,
    slot_stride,
    side_stride,
    lane_stride,
    dim,
    words,
    RATIO: tl.constexpr,
    BYTES: tl.constexpr,
    SIDES: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Write digests to `out`. Grid: (blocks times sides, layers).

    Elements are BYTES wide and consist of RATIO elements of the cache; narrow ones are parts of a
    word. RATIO divides the layers' distances.
    """
    item = tl.program_id(0) // SIDES
    side = tl.program_id(0) % SIDES
    layer = tl.program_id(1).to(tl.int64)
    origin = tl.load(where + 2 * layer) // RATIO
    block = tl.load(blocks + item)
    exists = (block >= 0) & (block < limit)
    last = tl.where(exists, SIZE, 0)
    here = (
        cache + origin + tl.where(exists, block, 0) * block_stride + side.to(tl.int64) * side_stride
    )
    total = tl.zeros([TILE, LANES], tl.uint64)
    for head in range(heads):
        for first in range(0, SIZE, TILE):
            slot = first + tl.arange(0, TILE)
            for begin in range(0, dim, LANES):
                lane = begin + tl.arange(0, LANES)
                mask = (slot < last)[:, None] & (lane < dim)[None, :]
                place = (
                    slot.to(tl.int64)[:, None] * slot_stride
                    + lane.to(tl.int64)[None, :] * lane_stride
                )
                bits = tl.load(
                    here + tl.cast(head, tl.int64) * head_stride + place, mask=mask, other=0
                )
                if BYTES == 1:
                    value = bits.to(tl.uint8, bitcast=True).to(tl.uint64)
                elif BYTES == 2:
                    value = bits.to(tl.uint16, bitcast=True).to(tl.uint64)
                elif BYTES == 4:
                    value = bits.to(tl.uint32, bitcast=True).to(tl.uint64)
                else:
                    value = bits.to(tl.uint64, bitcast=True)
                byte = lane * BYTES
                row = (head * SIZE + slot)[:, None] * words + (byte // 8)[None, :] + 1
                weight = mix(row.to(tl.uint64)) | 1
                total += (value << ((byte % 8) * 8).to(tl.uint64)[None, :]) * weight
    code = mix(tl.sum(tl.sum(total, axis=1), axis=0)).to(tl.int64, bitcast=True)
    tl.store(out + (item.to(tl.int64) * layers + before + layer) * SIDES + side, code, mask=exists)
