# SPDX-License-Identifier: Apache-2.0
"""Comparison of whole blocks in place, in plain torch, for the CPU.

Slots that are verified together mostly fill whole blocks. Reading a block in the order of its
memory is as fast as the memory is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from kvconform.kernels import lanes
from kvconform.kernels.codes import mix_array_
from kvconform.kernels.paged import Stack

T = TypeVar("T")
PIECE = 2 << 20
"""Bytes to compare at a time: what fits the processor's caches together with scratch memory."""
LARGE = 512 << 10
"""Bytes from which a block is compared in place; several smaller blocks are copied together."""
BATCH = 1 << 16
"""Rows whose codes are computed at a time; with fewer, the calls cost more than the work."""
THREADED = 32 << 20
"""Bytes from which threads are worth starting."""
BLOCKS = 1
"""Axis of the blocks in `Stack.bits`."""


def whole(slots: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indices [m] into `slots` [n] where a whole block begins, indices [k] of the others).

    A whole block is listed slot by slot, in order. Padding is in neither.
    """
    count = len(slots)
    if count < size:
        return slots.new_empty(0), (slots >= 0).nonzero().flatten()
    follows = torch.zeros(count + 1, dtype=torch.int64)
    torch.cumsum((slots[1:] == slots[:-1] + 1).to(torch.int64), 0, out=follows[1:count])
    runs = follows[size - 1 : count] - follows[: count - size + 1] == size - 1
    begins = (
        (runs & (slots[: count - size + 1] >= 0) & (slots[: count - size + 1] % size == 0))
        .nonzero()
        .flatten()
    )
    single = slots >= 0
    single[(begins[:, None] + torch.arange(size)).flatten()] = False
    return begins, single.nonzero().flatten()


def in_threads(
    work: Callable[[T], torch.Tensor], parts: Sequence[T], nbytes: int
) -> list[torch.Tensor]:
    """Return `work` of each part, in as many threads as torch uses if `nbytes` is large.

    Each thread then runs torch's operations alone. If torch split each operation instead, all
    threads would wait for the slowest one dozens of times per block. On a busy machine that takes
    most of the time.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(parts) == 1 or nbytes < THREADED:
        return [work(part) for part in parts]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, parts))
    finally:
        torch.set_num_threads(threads)  # new threads inherit the number that was set last


def widened(stack: Stack) -> Stack | None:
    """Return the stack with rows of integers of `lanes.UNITS`; None if the strides forbid it."""
    bits = stack.bits
    each = lanes.UNITS[bits.element_size()].itemsize // bits.element_size()
    strides = [
        stride if length > 1 else each
        for length, stride in zip(bits.shape[:-1], bits.stride()[:-1], strict=True)
    ]
    try:  # the stride of an axis of one element means nothing, but torch checks it
        bits = bits.as_strided(bits.shape, (*strides, bits.stride(-1))).view(
            lanes.UNITS[bits.element_size()]
        )
    except RuntimeError:
        return None
    return replace(stack, bits=bits)


def wrong_blocks(
    stack: Stack, dtype: torch.dtype, blocks: torch.Tensor, content: torch.Tensor
) -> torch.Tensor:
    """Return indices [k] of blocks [m] that may not hold the codes of content [m, block size].

    Blocks are compared in groups, so right blocks of a wrong group are included. All layers of the
    stack are compared. The stack must be `widened`, dim a multiple of 4. Changes nothing.
    """
    order = sorted(range(5), key=lambda axis: (-stack.bits.stride(axis), axis))
    axis = order.index(BLOCKS)
    cache = stack.bits.permute(*order, 5)
    _, _, heads, size, sides, _ = stack.bits.shape
    keys = (
        lanes.keys(stack.firsts, heads, sides, content.device)[:, None, :, None, :]
        .expand(-1, 1, -1, size, -1)
        .permute(order)
        .contiguous()
    )
    width = cache.numel() // cache.shape[axis] * cache.element_size()
    together = 1 if width >= LARGE else PIECE // width
    batch = -(-BATCH // keys.numel() // together) * together
    spare = Spare(dtype)
    comparisons: dict[tuple[int, int], Comparison] = {}
    found = []
    for mine in torch.arange(len(blocks)).split(batch):
        ids = (
            content[mine][None, :, None, :, None]
            .expand(-1, -1, -1, -1, sides)
            .permute(order)
            .contiguous()
        )
        codes = spare.codes(ids, keys)
        for number, some in enumerate(mine.split(together)):
            pieces = cache if together == 1 else spare.copy(cache, axis, blocks[some])
            geometry = (len(mine), len(some))
            if geometry not in comparisons:
                comparisons[geometry] = Comparison(pieces, codes, axis, len(some), together)
            piece = int(blocks[some[0]]) if together == 1 else 0
            if not comparisons[geometry].holds(piece, number):
                found.append(some)
    return torch.cat(found) if found else blocks.new_empty(0)


class Spare:
    """Scratch memory, reused for every piece, because fresh memory costs more than its use."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._piece = torch.empty(0, dtype=lanes.UNITS[dtype.itemsize])
        self._prints = torch.empty(0, dtype=torch.int64)
        self._shifted = torch.empty(0, dtype=torch.int64)
        self._index = torch.empty(0, dtype=torch.int32)
        self._codes = torch.empty(0, dtype=lanes.TABLES[dtype.itemsize])

    def codes(self, content: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return `lanes.quads` [..., units] of content ids and keys, valid until the next call.

        Their shapes are broadcast to [...].
        """
        shape = np.broadcast_shapes(content.shape, keys.shape)
        prints = torch.bitwise_xor(content, keys, out=self._prints.resize_(shape))
        shifted = self._shifted.resize_(prints.shape)
        mix_array_(prints.numpy().view(np.uint64), shifted.numpy().view(np.uint64))
        wanted = 4 * prints.numel()
        index, codes = self._index.resize_(wanted), self._codes.resize_(wanted)
        return lanes.quads(prints, self.dtype, index, codes)

    def copy(self, cache: torch.Tensor, axis: int, blocks: torch.Tensor) -> torch.Tensor:
        """Copy blocks [m] of the cache one after the other; valid until the next call."""
        shape = (*cache.shape[:axis], len(blocks), *cache.shape[axis + 1 :])
        return torch.index_select(cache, axis, blocks, out=self._piece.resize_(shape))


class Comparison:
    """Compares pieces of a cache with their `lanes.quads`, except for the nonce.

    Piece i has the indices of `axis` from i * count to (i + 1) * count, its codes as many from
    i * `step` on. The object keeps views of the tensors and compares what they hold when asked.

    A row repeats its first three groups, except that the fourth group is the nonce. So every unit
    is compared with the unit three groups before, for all adjacent rows at once. Three parts of
    that are then replaced: the first three groups are compared with the code, the nonce is ignored,
    and the group that was compared with the nonce is compared with the code.

    numpy compares, because it writes one byte per unit, which is faster.
    """

    def __init__(
        self, cache: torch.Tensor, codes: torch.Tensor, axis: int, count: int, step: int
    ) -> None:
        piece = cache.narrow(axis, 0, count)
        each, width = codes.shape[-1] // 4, piece.shape[-1]
        shape, strides = _rows(piece)
        # This reshape is a view, because codes have gaps only where the piece has them.
        marks = codes.narrow(axis, 0, count).reshape(*shape[:-1], 4 * each).stride()
        run, steps = shape, strides
        if shape[-2] > 1 and strides[-2] == width:
            run, steps = (*shape[:-2], shape[-2] * width), (*strides[:-2], 1)
        self._differs: np.ndarray = np.zeros(shape, bool)
        flat = self._differs.reshape(run)
        pieces, leap = cache.shape[axis] // count, count * cache.stride(axis)
        places, jump = (codes.shape[axis] - count) // step + 1, step * codes.stride(axis)
        begin, mark = cache.storage_offset(), codes.storage_offset()
        repeats = ((pieces, *run[:-1], run[-1] - 3 * each), (leap, *steps))
        self._later = cache.as_strided(*repeats, begin + 3 * each).numpy()
        self._earlier = cache.as_strided(*repeats, begin).numpy()
        self._repeats = flat[..., 3 * each :]
        self._nonce = self._differs[..., 3 * each : 4 * each]
        self._units: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        # Unit by unit, so that numpy's inner loop is over rows.
        for unit in (*range(3 * each), *range(6 * each, min(7 * each, width))):
            have = cache.as_strided(
                (pieces, *shape[:-1]), (leap, *strides[:-1]), begin + unit
            ).numpy()
            want = codes.as_strided(
                (places, *shape[:-1]), (jump, *marks[:-1]), mark + unit % (3 * each)
            ).numpy()
            self._units.append((have, want, self._differs[..., unit]))

    def holds(self, piece: int, code: int) -> bool:
        """Return True if all rows of piece number `piece` hold the codes number `code`."""
        np.not_equal(self._later[piece], self._earlier[piece], out=self._repeats)
        self._nonce[...] = False
        for have, want, out in self._units:
            np.not_equal(have[piece], want[code], out=out)
        return not self._differs.any()


def _rows(piece: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, strides) [..., row, width] of a piece [..., width], in the same order.

    Rows that are adjacent in memory are on one axis.
    """
    width = piece.shape[-1]
    axes = [
        (length, stride)
        for length, stride in zip(piece.shape[:-1], piece.stride()[:-1], strict=True)
        if length > 1
    ]
    rows, step = axes.pop() if axes else (1, width)
    while axes and axes[-1][1] == rows * step:
        rows *= axes.pop()[0]
    shape = (*(length for length, _ in axes), rows, width)
    return shape, (*(stride for _, stride in axes), step, 1)
