# SPDX-License-Identifier: Apache-2.0
"""Whole blocks compared where they lie: most slots that are verified together are all slots of a block, and reading a block in the order
of its memory is as fast as the memory is. In plain torch, for the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvconform.kernels import lanes
from kvconform.kernels.paged import Stack

PIECE = 2 << 20
"""Bytes that are compared at a time: about what the processor's caches hold together with the scratch memory."""
BATCH = 1 << 16
"""Rows whose codes are computed at a time: fewer cost more for each call than for its work."""
LAYERS, BLOCKS, HEADS, PLACES, SIDES = range(5)


def whole(slots: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices [m] at which `slots` [n] list all slots of a block, one after the other; indices [k] of all others but padding)."""
    count = len(slots)
    if count < size:
        return slots.new_empty(0), (slots >= 0).nonzero().flatten()
    follows = torch.zeros(count + 1, dtype=torch.int64)
    torch.cumsum((slots[1:] == slots[:-1] + 1).to(torch.int64), 0, out=follows[1:count])
    runs = follows[size - 1 : count] - follows[: count - size + 1] == size - 1
    begins = (runs & (slots[: count - size + 1] >= 0) & (slots[: count - size + 1] % size == 0)).nonzero().flatten()
    single = slots >= 0
    single[(begins[:, None] + torch.arange(size)).flatten()] = False
    return begins, single.nonzero().flatten()


class Spare:
    """Memory for what is computed on the way, used again for every piece: fresh memory costs more than its use."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.found = torch.empty(0, dtype=lanes.UNITS[dtype.itemsize])
        self._prints, self._shifted = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        self._index, self._codes = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=lanes.TABLES[dtype.itemsize])

    def codes(self, content: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """`lanes.quads` [..., units] of content ids and keys, whose shapes are broadcast to [...]. Valid until the next call."""
        shape = torch.broadcast_shapes(content.shape, keys.shape)
        prints = torch.bitwise_xor(content, keys, out=self._prints.resize_(shape))
        lanes.mix64_(prints, self._shifted.resize_(shape))
        wanted = 4 * prints.numel()
        return lanes.quads(prints, self.dtype, self._index.resize_(wanted), self._codes.resize_(wanted))


def comparable(stack: Stack) -> bool:
    """True when the rows of a stack can be viewed as wider integers, which is what `wrong_blocks` needs besides dim."""
    try:
        stack.bits.view(lanes.UNITS[stack.bits.element_size()])
    except RuntimeError:
        return False
    return True


def wrong_blocks(stack: Stack, dtype: torch.dtype, blocks: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Indices [k] of those of blocks [m] whose slots do not hold the codes of content [m, block size] in all layers of the stack; reported
    together with some that do. Changes nothing. The elements must be next to each other, and dim a multiple of 4."""
    order = sorted(range(5), key=lambda axis: (-stack.bits.stride(axis), axis))
    unit = lanes.UNITS[dtype.itemsize]
    cache = stack.bits.permute(*order, 5).view(unit)
    heads, sides = stack.bits.shape[HEADS], stack.bits.shape[SIDES]
    keys = lanes.keys(stack.numbers, heads, sides, content.device)[:, None, :, None, :].permute(order)
    found, spare = [], Spare(dtype)
    for mine, some in _pieces(cache, order.index(BLOCKS), blocks, keys.numel() * content.shape[1]):
        ids = content[mine].view(1, len(mine), 1, -1, 1).permute(order)
        codes = spare.codes(ids, keys)
        for at, piece in some:
            if not _holds(spare.found, piece, codes.narrow(order.index(BLOCKS), at, piece.shape[order.index(BLOCKS)])):
                found.append(mine[at : at + piece.shape[order.index(BLOCKS)]])
    return torch.cat(found) if found else blocks.new_empty(0)


def _pieces(
    cache: torch.Tensor, axis: int, blocks: torch.Tensor, rows: int
) -> Iterator[tuple[torch.Tensor, list[tuple[int, torch.Tensor]]]]:
    """Batches of (indices into `blocks`, [(which of them is the first, the blocks' units in the order of memory)]). Blocks that are large
    are not copied; of small ones several are, together."""
    width = cache[0].numel() * cache.shape[0] // cache.shape[axis] * cache.element_size()
    together = max(1, PIECE // width)
    batch = max(together, BATCH // rows)
    for first in range(0, len(blocks), batch):
        mine = torch.arange(first, min(first + batch, len(blocks)))
        listed = blocks[mine]
        if together == 1:
            yield mine, [(at, cache.narrow(axis, block, 1)) for at, block in enumerate(listed.tolist())]
        else:
            yield mine, [(at, cache.index_select(axis, listed[at : at + together])) for at in range(0, len(mine), together)]


def _holds(spare: torch.Tensor, cache: torch.Tensor, codes: torch.Tensor) -> bool:
    """True when rows [..., dim] (units) hold `lanes.quads` [..., 4 groups], the nonce apart. Overwrites `spare`.

    A row is its first three groups over and over, but for the nonce, which is its fourth. So every unit is compared with the one three
    groups before, all rows in one go, and then what that gets wrong is done anew: the first three groups are compared with the code, the
    nonce is not, and the group that would be compared with the nonce is compared with the code.
    """
    each = codes.shape[-1] // 4
    rows = _merged(cache)
    width = cache.shape[-1]
    flat = _joined(rows)
    scratch = spare.resize_(flat.shape)
    torch.bitwise_xor(flat[..., 3 * each :], flat[..., : -3 * each], out=scratch[..., 3 * each :])
    codes = codes.reshape(*rows.shape[:-1], 4 * each)
    found = scratch.view(rows.shape)
    torch.bitwise_xor(rows[..., : 3 * each], codes[..., : 3 * each], out=found[..., : 3 * each])
    found[..., 3 * each : 4 * each] = 0
    if width > 6 * each:
        torch.bitwise_xor(rows[..., 6 * each : 7 * each], codes[..., :each], out=found[..., 6 * each : 7 * each])
    return not int(scratch.view(torch.uint8).max())


def _merged(cache: torch.Tensor) -> torch.Tensor:
    """[..., row, width] of [..., width]: rows that follow one another in memory as one axis, axes of one entry gone, in the same order."""
    axes = [(length, stride) for length, stride in zip(cache.shape[:-1], cache.stride()[:-1], strict=True) if length > 1]
    rows, step = axes.pop() if axes else (1, cache.shape[-1])
    while axes and axes[-1][1] == rows * step:
        rows *= axes.pop()[0]
    return cache.as_strided(
        (*(length for length, _ in axes), rows, cache.shape[-1]), (*(stride for _, stride in axes), step, 1), cache.storage_offset()
    )


def _joined(rows: torch.Tensor) -> torch.Tensor:
    """[..., row * width] of [..., row, width] where rows follow one another, else [..., row, width] as it is."""
    if rows.stride(-2) != rows.shape[-1]:
        return rows
    return rows.as_strided((*rows.shape[:-2], rows.shape[-2] * rows.shape[-1]), (*rows.stride()[:-2], 1), rows.storage_offset())
