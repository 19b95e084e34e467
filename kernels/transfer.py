# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Gather and scatter: copy slots of a paged cache to contiguous rows and back, as connectors do."""

from __future__ import annotations

import torch

from kvconform.kernels.device import (
    Cut,
    choose,
    distance,
    on,
    program,
    slots_of,
    start,
    tl,
    triton,
)
from kvconform.kernels.paged import BITS, Paged
from kvconform.kernels.rows import split
from kvconform.kernels.wide import wider


def gather(
    paged: Paged, slots: torch.Tensor, out: torch.Tensor | None = None, backend: str | None = None
) -> torch.Tensor:
    """Return the rows [layers, n, heads, sides, dim] of slots [n] int64.

    They are contiguous, have the cache's dtype, and are written to `out` if given. Rows of padding
    (negative slots) become zeros. Changes only `out`. ValueError for tensors of another shape,
    dtype, device or order, and on the CPU for a slot beyond the last. On CUDA the row of such a
    slot becomes zeros, and the host does not wait: there is one launch for all layers of the same
    strides.
    """
    slots = paged.check_slots(slots)
    shape = (len(paged.numbers), len(slots), paged.heads, paged.sides, paged.dim)
    if out is None:
        out = torch.empty(shape, dtype=paged.dtype, device=paged.device)
    bits = _contiguous(paged, out, shape)
    (gather_triton if choose(paged.device, backend) else gather_torch)(paged, slots, bits)
    return out


def scatter(
    paged: Paged, slots: torch.Tensor, rows: torch.Tensor, backend: str | None = None
) -> None:
    """Write rows [layers, n, heads, sides, dim] to slots [n] int64, the reverse of `gather`.

    Rows are contiguous and of the cache's dtype. Negative slots are padding and are skipped. It is
    undefined which row a slot gets that is listed twice. Changes only the cache. Errors as in
    `gather`; nothing is written then. On CUDA slots beyond the last are skipped.
    """
    slots = paged.check_slots(slots)
    bits = _contiguous(
        paged, rows, (len(paged.numbers), len(slots), paged.heads, paged.sides, paged.dim)
    )
    (scatter_triton if choose(paged.device, backend) else scatter_torch)(paged, slots, bits)


def _contiguous(paged: Paged, rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(rows.shape) != shape or rows.dtype != paged.dtype:
        raise ValueError(
            f"rows must be {shape} of {paged.dtype}, not {tuple(rows.shape)} of {rows.dtype}"
        )
    if rows.device != paged.device:
        raise ValueError(
            f"rows must be on the cache's device, {paged.device}, not on {rows.device}"
        )
    if not rows.is_contiguous():
        raise ValueError("rows must be contiguous")
    return rows.view(BITS[paged.itemsize])


def gather_torch(paged: Paged, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Compute `gather` in plain torch, for checked arguments.

    `out`: viewed as integers of the elements' size.
    """
    missing = (slots < 0) | (slots >= paged.slots)
    known = slots.masked_fill(missing, 0)
    for stack in paged.stacks:
        blocks, places = split(stack.bits, known)
        wide, rows = wider(stack.bits, out)
        for layer, bits in enumerate(wide):
            torch.ops.aten.index.Tensor_out(
                bits, [blocks, None, places], out=rows[stack.start + layer]
            )
    absent = missing.nonzero().flatten()
    if len(absent):
        out.index_fill_(1, absent, 0)


def scatter_torch(paged: Paged, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Compute `scatter` in plain torch, for checked arguments.

    `rows`: viewed as integers of the elements' size.
    """
    known = ((slots >= 0) & (slots < paged.slots)).nonzero().flatten()
    whole = len(known) == len(slots)
    for stack in paged.stacks:
        blocks, places = split(stack.bits, slots if whole else slots[known])
        wide, given = wider(stack.bits, rows)
        for layer, bits in enumerate(wide):
            mine = given[stack.start + layer]
            bits[blocks, :, places] = mine if whole else mine[known]


def gather_triton(paged: Paged, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Compute `gather` with the Triton kernel, for checked arguments."""
    _transfer(paged, slots, out, False)


def scatter_triton(paged: Paged, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Compute `scatter` with the Triton kernel, for checked arguments."""
    _transfer(paged, slots, rows, True)


def merged(paged: Paged, stride: tuple[int, ...]) -> tuple[int, int]:
    """Return (sides, dim) of a cache of these strides; adjacent K and V count as one row."""
    _, _, _, side, lane = stride
    if lane == 1 and (paged.sides == 1 or side == paged.dim):
        return 1, paged.sides * paged.dim
    return paged.sides, paged.dim


def _transfer(paged: Paged, slots: torch.Tensor, rows: torch.Tensor, into: bool) -> None:
    count = len(slots)
    if not count:
        return
    row = paged.heads * paged.sides * paged.dim
    with on(paged.device):
        for launch in paged.launches:
            sides, dim = merged(paged, launch.strides)
            cut = Cut.of(count, dim, paged.itemsize, copied=True)
            start(
                transfer_kernel,
                launch.grid(cut.programs(count, paged.heads, sides)),
                (launch.base, launch.where, slots, rows[launch.start :]),
                (count, paged.slots, paged.heads, launch.layers),
                (
                    *launch.strides,
                    row,
                    sides * dim,
                    dim,
                    sides,
                    paged.size,
                    launch.align,
                    launch.inside,
                    *cut,
                    into,
                ),
            )


@triton.jit(do_not_specialize=["count", "limit", "heads", "layers"])
def transfer_kernel(
    cache,
    where,
    slots,
    rows,
    count,
    limit,
    heads,
    layers,
    block_stride,
    head_stride,
    slot_stride,
    side_stride,
    lane_stride,
    row_stride,
    row_head_stride,
    dim,
    SIDES: tl.constexpr,
    SIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    INSIDE: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    INTO: tl.constexpr,
) -> None:
    """Copy rows to the cache (INTO) or from it. Grid as in `write_kernel`."""
    tile, side, head, layer = program(heads, layers, SIDES, INSIDE)
    origin = tl.multiple_of(tl.load(where + 2 * layer), ALIGN)
    item = tile * TILE + tl.arange(0, TILE)
    slot = slots_of(slots, item, count, SIZE, False)
    away, exists = distance(slot, limit, block_stride, slot_stride, SIZE)
    here = (
        cache
        + origin
        + head.to(tl.int64) * head_stride
        + side.to(tl.int64) * side_stride
        + away[:, None]
    )
    there = (
        rows
        + layer * count * row_stride
        + head * row_head_stride
        + side * dim
        + item.to(tl.int64)[:, None] * row_stride
    )
    for chunk in tl.static_range(0, CHUNKS):
        lane = (chunk * LANES + tl.arange(0, LANES)).to(tl.int64)[None, :]
        known = exists[:, None] if EVEN else exists[:, None] & (lane < dim)
        listed = (item < count)[:, None] if EVEN else (item < count)[:, None] & (lane < dim)
        if INTO:
            tl.store(here + lane * lane_stride, tl.load(there + lane, mask=known), mask=known)
        else:
            tl.store(
                there + lane, tl.load(here + lane * lane_stride, mask=known, other=0), mask=listed
            )
