# SPDX-License-Identifier: Apache-2.0
"""Whole blocks compared where they lie: most slots that are verified together are all slots of a block, and reading a block in the order
of its memory is as fast as the memory is. In plain torch, for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from kvconform.kernels import lanes
from kvconform.kernels.paged import Stack

T = TypeVar("T")
PIECE = 2 << 20
"""Bytes that are compared at a time: about what the processor's caches hold together with the scratch memory."""
LARGE = 512 << 10
"""Bytes from which on a block is compared where it lies; of smaller ones several are copied together."""
BATCH = 1 << 16
"""Rows whose codes are computed at a time: fewer cost more for each call than for its work."""
THREADED = 32 << 20
"""Bytes from which on threads are worth being started."""
BLOCKS = 1


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


def in_threads(work: Callable[[T], torch.Tensor], parts: Sequence[T], nbytes: int) -> list[torch.Tensor]:
    """`work` of each part, in as many threads as torch uses, if together they read many bytes.

    Each thread then has torch's operations to itself: were each shared out instead, all threads would wait for the last one dozens of
    times per block, and on a machine that does something else too that is most of the time.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(parts) == 1 or nbytes < THREADED:
        return [work(part) for part in parts]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, parts))
    finally:
        torch.set_num_threads(threads)  # threads that others start take over the number that was set last


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
    axis = order.index(BLOCKS)
    cache = stack.bits.permute(*order, 5).view(lanes.UNITS[dtype.itemsize])
    _, _, heads, size, sides, _ = stack.bits.shape
    keys = (
        lanes.keys(stack.numbers, heads, sides, content.device)[:, None, :, None, :].expand(-1, 1, -1, size, -1).permute(order).contiguous()
    )
    width = cache.numel() // cache.shape[axis] * cache.element_size()
    together = 1 if width >= LARGE else PIECE // width
    batch = -(-BATCH // keys.numel() // together) * together
    spare = Spare(dtype)
    comparisons: dict[int, Comparison] = {}
    found = []
    for mine in torch.arange(len(blocks)).split(batch):
        ids = content[mine][None, :, None, :, None].expand(-1, -1, -1, -1, sides).permute(order).contiguous()
        codes = spare.codes(ids, keys)
        for at in range(0, len(mine), together):
            some = mine[at : at + together]
            piece = cache.narrow(axis, int(blocks[some[0]]), 1) if together == 1 else spare.copy(cache, axis, blocks[some])
            mark = codes.narrow(axis, at, len(some))
            if len(some) not in comparisons:
                comparisons[len(some)] = Comparison(piece, mark)
            if not comparisons[len(some)].holds(piece, mark):
                found.append(some)
    return torch.cat(found) if found else blocks.new_empty(0)


class Spare:
    """Memory for what is computed on the way, used again for every piece: fresh memory costs more than its use."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._piece = torch.empty(0, dtype=lanes.UNITS[dtype.itemsize])
        self._prints, self._shifted = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        self._index, self._codes = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=lanes.TABLES[dtype.itemsize])

    def codes(self, content: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """`lanes.quads` [..., units] of content ids and keys, whose shapes are broadcast to [...]. Valid until the next call."""
        shape = torch.broadcast_shapes(content.shape, keys.shape)
        prints = torch.bitwise_xor(content, keys, out=self._prints.resize_(shape))
        lanes.mix64_(prints, self._shifted.resize_(shape))
        wanted = 4 * prints.numel()
        return lanes.quads(prints, self.dtype, self._index.resize_(wanted), self._codes.resize_(wanted))

    def copy(self, cache: torch.Tensor, axis: int, blocks: torch.Tensor) -> torch.Tensor:
        """Blocks [m] of the cache, one after the other. Valid until the next call."""
        shape = (*cache.shape[:axis], len(blocks), *cache.shape[axis + 1 :])
        return torch.index_select(cache, axis, blocks, out=self._piece.resize_(shape))


class Comparison:
    """Compares pieces of one geometry with `lanes.quads`, the nonce apart.

    A row is its first three groups over and over, but for the nonce, which is its fourth. So every unit is compared with the one three
    groups before, all rows that follow one another in one go, and then what that gets wrong is done anew: the first three groups are
    compared with the code, the nonce is not, and the group that would be compared with the nonce is compared with the code.
    """

    def __init__(self, piece: torch.Tensor, codes: torch.Tensor) -> None:
        each, width = codes.shape[-1] // 4, piece.shape[-1]
        shape, strides = _rows(piece)
        marks = codes.reshape(*shape[:-1], 4 * each).stride()  # a view: codes have gaps where the piece has, at most
        run, steps = shape, strides
        if shape[-2] > 1 and strides[-2] == width:
            run, steps = (*shape[:-2], shape[-2] * width), (*strides[:-2], 1)
        scratch = torch.empty(shape, dtype=piece.dtype)
        flat = scratch.view(run)
        self._bytes = scratch.view(torch.uint8)
        self._nonce = scratch[..., 3 * each : 4 * each]
        self._steps: list[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...] | None, int, torch.Tensor]] = [
            ((*run[:-1], run[-1] - 3 * each), steps, 3 * each, None, 0, flat[..., 3 * each :]),
            ((*shape[:-1], 3 * each), strides, 0, marks, 0, scratch[..., : 3 * each]),
        ]
        if width > 6 * each:
            self._steps.append(((*shape[:-1], each), strides, 6 * each, marks, 0, scratch[..., 6 * each : 7 * each]))

    def holds(self, piece: torch.Tensor, codes: torch.Tensor) -> bool:
        """True when all rows of the piece hold their codes."""
        begin, mark = piece.storage_offset(), codes.storage_offset()
        for shape, strides, at, marks, place, out in self._steps:
            one = piece.as_strided(shape, strides, begin + at)
            other = piece.as_strided(shape, strides, begin) if marks is None else codes.as_strided(shape, marks, mark + place)
            torch.bitwise_xor(one, other, out=out)
        self._nonce.zero_()
        return not int(self._bytes.max())  # the greatest byte is found faster than `any` finds one that is not zero


def _rows(piece: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) [..., row, width] of a piece [..., width]: rows that follow one another in memory on one axis, in the same order."""
    width = piece.shape[-1]
    axes = [(length, stride) for length, stride in zip(piece.shape[:-1], piece.stride()[:-1], strict=True) if length > 1]
    rows, step = axes.pop() if axes else (1, width)
    while axes and axes[-1][1] == rows * step:
        rows *= axes.pop()[0]
    return (*(length for length, _ in axes), rows, width), (*(stride for _, stride in axes), step, 1)
