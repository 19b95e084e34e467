# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Write codes into slots, as an engine's forward pass writes KV into the cache."""

from __future__ import annotations

import torch

from kvconform.kernels import lanes
from kvconform.kernels.device import (
    EACH,
    Cut,
    choose,
    distance,
    expected,
    on,
    origin_of,
    program,
    slots_of,
    start,
    tl,
    triton,
    turned,
)
from kvconform.kernels.paged import Paged
from kvconform.kernels.rows import pieces, put


def write(
    paged: Paged,
    slots: torch.Tensor,
    content: torch.Tensor,
    nonce: int = 0,
    backend: str | None = None,
) -> None:
    """Fill slots [n] int64 with the codes of `content` [n] (int64 or uint64).

    All layers, heads and sides are written, with the values of `codes.CodeBook.rows`; `nonce` (16
    bits) goes into the nonce lanes. Negative slots are padding and are skipped. Slots may come in
    any order. It is undefined which code a slot gets that is listed twice. Changes only the cache.

    ValueError for tensors of another shape, dtype or device, and on the CPU for a slot beyond the
    last; nothing is written then. On CUDA such slots are skipped, and the host does not wait: there
    is one launch for all layers of the same strides.
    """
    slots = paged.check_slots(slots)
    content = paged.check_content(content, len(slots))
    (write_triton if choose(paged.device, backend) else write_torch)(paged, slots, content, nonce)


def write_torch(paged: Paged, slots: torch.Tensor, content: torch.Tensor, nonce: int = 0) -> None:
    """Compute `write` in plain torch, for checked arguments."""
    for stack, mine in pieces(paged, slots):
        codes = lanes.rows(
            content[mine], stack.firsts, paged.heads, paged.sides, paged.dim, paged.dtype, nonce
        )
        put(stack.bits, slots[mine], codes)


def write_triton(
    paged: Paged, slots: torch.Tensor, content: torch.Tensor, nonce: int = 0, blocks: bool = False
) -> None:
    """Compute `write` with the Triton kernel, for checked arguments.

    `blocks`: `slots` lists blocks instead, and all their slots are written.
    """
    count = len(slots) * (paged.size if blocks else 1)
    if not count:
        return
    cut = Cut.of(count, paged.dim, paged.itemsize)
    with on(paged.device):
        for launch in paged.launches:
            units = launch.units
            programs = cut.programs(count, paged.heads, paged.sides)
            start(
                write_kernel,
                launch.grid(programs),
                (units.bits, launch.where, slots, content),
                (count, paged.slots, paged.heads, launch.layers, nonce & 0xFFFF),
                (
                    *units.strides,
                    units.bits.shape[-1],
                    paged.kind,
                    paged.sides,
                    paged.size,
                    blocks,
                    launch.align,
                    launch.inside,
                    *cut,
                    EACH[paged.itemsize],
                    units.pack,
                ),
            )


@triton.jit(do_not_specialize=["count", "limit", "heads", "layers", "nonce"])
def write_kernel(
    cache,
    where,
    slots,
    content,
    count,
    limit,
    heads,
    layers,
    nonce,
    block_stride,
    head_stride,
    slot_stride,
    side_stride,
    lane_stride,
    dim,
    KIND: tl.constexpr,
    SIDES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGN: tl.constexpr,
    INSIDE: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    EACH: tl.constexpr,
    PACK: tl.constexpr,
) -> None:
    """Write codes. Grid: see `device.program`.

    The cache is given as integers of PACK elements, in which its strides and `dim` count. Offsets
    are 64-bit, because caches have more than 2^31 elements.
    """
    tile, side, head, layer = program(heads, layers, SIDES, INSIDE)
    origin = origin_of(where, layer, ALIGN, PACK)
    first = tl.load(where + 2 * layer + 1)
    item = tile * TILE + tl.arange(0, TILE)
    slot = slots_of(slots, item, count, SIZE, BLOCKS)
    away, exists = distance(slot, limit, block_stride, slot_stride, SIZE)
    ids = tl.load(content + (item // SIZE if BLOCKS else item), mask=item < count, other=0)
    here = (
        cache
        + origin
        + head.to(tl.int64) * head_stride
        + side.to(tl.int64) * side_stride
        + away[:, None]
    )
    exists = exists[:, None]
    low, high = turned(ids, first, side, head, LANES, EACH)
    for chunk in tl.static_range(0, CHUNKS):
        word = (chunk * (LANES // PACK) + tl.arange(0, LANES // PACK))[None, :]
        bits = expected(low, high, chunk, nonce, KIND, LANES, EACH, PACK)
        mask = exists if EVEN else exists & (word < dim)
        tl.store(here + word.to(tl.int64) * lane_stride, bits.to(cache.dtype.element_ty), mask=mask)
