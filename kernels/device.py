# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Shared parts of the Triton kernels: availability, division of a launch, codes on the device.

A program handles TILE slots of one layer, head and side: a tile of rows, in CHUNKS chunks of LANES
elements. A row is contiguous if the layout has it so. Programs that differ only in the head are
neighbours, so that a token whose heads are adjacent in memory is written together.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the kernels in plain torch are used

    class _Absent:
        """Stand-in for Triton if it is not installed; the kernels are then unused functions."""

        constexpr: Any = None

        @staticmethod
        def jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
            return function if function is not None else lambda given: given

    triton = tl = _Absent()
    AVAILABLE = False
else:
    AVAILABLE = True

INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels run in Triton's interpreter, on the CPU, for tests."""
ON_NVIDIA = torch.version.hip is None
ASSEMBLY = tl.constexpr(not INTERPRETED and ON_NVIDIA) if AVAILABLE else False
"""Whether kernels may have instructions of NVIDIA's devices."""
__all__ = [
    "AVAILABLE",
    "EACH",
    "INTERPRETED",
    "Cut",
    "choose",
    "distance",
    "encode",
    "expected",
    "mix",
    "on",
    "origin_of",
    "program",
    "slots_of",
    "start",
    "tl",
    "triton",
    "turned",
]
ROW_BYTES = 128
"""Bytes of a row that a program's warps access at once.

These are whole cache lines of four rows, so that few threads compute the same row's code.
"""
COPIED_BYTES = 2048
"""The same for rows that are copied, and not computed.

Parts of a row that are read one after the other cost more than lanes without an element.
"""
TILE_BYTES = 16384
"""Bytes of a program's tile: 128 per thread with 4 warps, so eight accesses of 16 bytes each."""
TILE_ROWS = 64
"""Most rows of a tile; twice as many if they are copied."""
FEW_ROWS = 16
"""Rows of a tile if there are not more."""
WIDE_BYTES = 16
"""Bytes of the widest access. Rows that are no multiple of it are accessed element by element."""
TILE_SINGLE = 2048
"""Elements of a program's tile if each is accessed alone: 16 per thread, with as many addresses.

With more, compilers keep some of them in memory.
"""
EACH = {1: 16, 2: 8, 4: 8}
"""Lanes whose code is computed together, by size of an element: a thread has 16 adjacent bytes."""


def choose(device: torch.device, backend: str | None) -> bool:
    """Return True for Triton, False for torch.

    `backend`: "triton", "torch" or None, which chooses Triton for CUDA if it is installed.
    ValueError for another name, and for Triton if it is missing or the tensors are on the CPU
    (except in the interpreter).
    """
    if backend not in (None, "torch", "triton"):
        raise ValueError(f'a backend is "torch" or "triton", not {backend!r}')
    able = AVAILABLE and (device.type == "cuda" or INTERPRETED)
    if backend == "triton" and not able:
        if not AVAILABLE:
            raise ValueError("Triton is not installed")
        raise ValueError(f"Triton cannot run on {device} (TRITON_INTERPRET=1 is not set)")
    return able and (backend == "triton" or device.type == "cuda")


def on(device: torch.device) -> Any:
    """Return a context in which launches go to this device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


_compiled: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by all that they were compiled for (`start`)."""


def start(
    kernel: Any,
    grid: tuple[int, int],
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[int, ...],
    constants: tuple[int, ...],
) -> None:
    """Launch a kernel with these arguments, in this order, on the current device.

    Triton looks at every argument to find what to launch, and asks the driver about every tensor,
    which takes the host as long as several launches. Here it is found by what a compilation depends
    on: the constants, and the types and alignment of the tensors. `numbers` are those for which the
    kernel says do_not_specialize; they have 31 bits at most.
    """
    places = tuple(tensor.data_ptr() for tensor in tensors)
    kinds = tuple((tensor.dtype, place % 16) for tensor, place in zip(tensors, places, strict=True))
    key = (kernel, tensors[0].device, constants, kinds)
    known = _compiled.get(key) if ON_NVIDIA else None  # AMD's compiler looks at sizes, too
    if known is not None:
        known[(*grid, 1)](*places, *numbers, *constants)
        return
    made = kernel[grid](*tensors, *numbers, *constants)
    if made is not None:  # the interpreter makes nothing
        _compiled[key] = made


class Cut(NamedTuple):
    """Division of a launch into programs; kernels take its fields as arguments, in this order.

    A program handles `tile` rows of a head's K or V, in `chunks` chunks of `lanes` elements.
    `even`: no row ends inside a chunk.
    """

    tile: int
    lanes: int
    chunks: int
    even: bool

    @classmethod
    @lru_cache
    def of(cls, rows: int, dim: int, itemsize: int, copied: bool = False) -> Cut:
        """Return the division for `rows` rows of `dim` elements.

        `copied`: a program reads and writes chunk by chunk, so that a chunk has to be what
        otherwise a tile is.
        """
        row_bytes = COPIED_BYTES if copied else ROW_BYTES
        widest = min(row_bytes // itemsize, 1 << (dim - 1).bit_length())
        lanes = widest
        # 96 elements are divided into three times 32 rather than twice 64.
        while not copied and dim % lanes and lanes * itemsize > 64:
            lanes //= 2
        if dim % lanes:
            lanes = widest
        chunks = -(-dim // lanes)
        tile, most = (1, 2 * TILE_ROWS) if copied else (FEW_ROWS, TILE_ROWS)
        row = lanes * itemsize * (1 if copied else chunks)
        fits = TILE_BYTES // row
        if dim * itemsize % WIDE_BYTES:
            fits = TILE_SINGLE * itemsize // row
        while tile < most and 2 * tile <= fits:
            tile *= 2
        # Two sizes of a tile: each is compiled, which takes a second.
        few = min(FEW_ROWS, tile)
        return cls(few if rows <= few else tile, lanes, chunks, dim % lanes == 0)

    def programs(self, rows: int, heads: int, sides: int) -> int:
        """Return the number of programs per layer."""
        return -(-rows // self.tile) * heads * sides


@triton.jit
def mix(value):
    """Compute `codes.mix64` of uint64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def encode(word, place, KIND: tl.constexpr):
    """Return the bits (int32) of nibbles `place` (0..7) of words (uint32) in the dtype of KIND.

    A float32 has the nibble in its mantissa, where it stands in the word, with the exponent that
    makes it count as 0..15. Subtracting what the exponent stands for leaves the number. This costs
    less than to shift and convert. The narrower formats are the upper bits of that with another
    bias, for which 0 is clamped.
    """
    if KIND == 0:
        return ((word >> (place * 4).to(tl.uint32)) & 15).to(tl.int32)
    else:
        # A mantissa has 23 bits, so the upper nibbles are shifted down.
        at = tl.where(place < 5, place * 4, place * 4 - 12)
        near = tl.where(place < 5, word, word >> 12).to(tl.int32, bitcast=True)
        one = 0x4B000000 - (at << 23)
        number = (near & (15 << at)) | one
        bits = (number.to(tl.float32, bitcast=True) - one.to(tl.float32, bitcast=True)).to(
            tl.int32, bitcast=True
        )
        if KIND == 1:
            bits = tl.maximum((bits >> 20) - 960, 0)
        if KIND == 2:
            bits = tl.maximum((bits >> 13) - 114688, 0)
        if KIND == 3:
            bits = bits >> 16
        return bits


@triton.jit
def chosen(low, high, BYTES):
    """Return four of eight bytes (uint32), as PTX's prmt does: nibble n of BYTES chooses byte n."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [low, high, BYTES],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def pairs(quad, place, KIND: tl.constexpr):
    """Return two 16-bit floats (int32), of bytes `place` % 4 (even) and the next of words (uint32).

    A byte 0x43 above a number below 16 makes the bfloat16 128 + n, and 0x64 the float16 1024 + n.
    Two numbers are subtracted from at once, in half the instructions of `encode`.
    """
    both = 0x4140 + (place % 4 // 2) * 0x202
    BYTES: tl.constexpr = 0x43434343 if KIND == 3 else 0x64646464
    ONES: tl.constexpr = 0x3F803F80 if KIND == 3 else 0x3C003C00
    LESS: tl.constexpr = -0x3CFF3D00 if KIND == 3 else -0x1BFF1C00  # -128, -1024, each twice
    SUBTRACT: tl.constexpr = "fma.rn.bf16x2" if KIND == 3 else "fma.rn.f16x2"
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $1, $2, $3; " + SUBTRACT + " $0, t, $4, $5; }",
        "=r,r,r,r,r,r",
        [quad, BYTES, both, ONES, LESS],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def eight(low, high, begin):
    """Return eight nibbles (uint32) of codes from nibble `begin` (0, 4 or 8) on, cyclically.

    `low` has the first eight of the twelve nibbles, the lower half of `high` the last four.
    """
    return tl.where(
        begin == 0,
        low,
        tl.where(begin == 4, (low >> 16) | (high << 16), (high & 0xFFFF) | (low << 16)),
    )


@triton.jit
def turned(content, first, side, head, LANES: tl.constexpr, EACH: tl.constexpr):
    """Return the codes of content ids [rows] int64 as two uint32 [rows, LANES / EACH].

    A row's lanes repeat the twelve nibbles of its code. Those of a group of EACH lanes begin with
    the nibble with which the group begins in a chunk of LANES that begins with the code. Eight are
    in the first integer, four in the lower half of the second. `first`: the layer's
    `paged.first_key`.
    """
    key = mix((first + side * 4096 + head).to(tl.uint64))
    code = mix(content.to(tl.uint64, bitcast=True) ^ key)
    low = (code & 0xFFFFFFFF).to(tl.uint32)[:, None]
    high = (code >> 32).to(tl.uint32)[:, None]
    begin = (tl.arange(0, LANES // EACH) * EACH % 12)[None, :]
    if ASSEMBLY:
        near = tl.where(begin == 0, 0x3210, tl.where(begin == 4, 0x5432, 0x1054))
        far = tl.where(begin == 0, 0x5454, tl.where(begin == 4, 0x1010, 0x3232))
        return chosen(low, high, near), chosen(low, high, far)
    else:
        return eight(low, high, begin), eight(low, high, (begin + 8) % 12)


@triton.jit
def expected(
    low,
    high,
    chunk: tl.constexpr,
    nonce,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    PACK: tl.constexpr,
):
    """Return the bits [rows, LANES / PACK] (int32) of a chunk, with PACK lanes in an integer.

    `low`, `high`: as `turned` returns them. What depends on the row or on the group is computed
    once for it. `nonce`: None leaves the lanes of the nonce without meaning.
    """
    BEGIN: tl.constexpr = chunk * LANES % 12
    WIDTH: tl.constexpr = 8 if KIND < 2 else 16 if KIND < 4 else 32
    place = (tl.arange(0, EACH // PACK) * PACK)[None, None, :]
    group = tl.arange(0, LANES // EACH)[None, :]
    if PACK == 2 and WIDTH == 16 and ASSEMBLY:
        # Four nibbles become four bytes.
        even, odd = low & 0x0F0F0F0F, (low >> 4) & 0x0F0F0F0F
        a, b = chosen(even, odd, 0x5140), chosen(even, odd, 0x7362)
        c = chosen(high & 0x0F0F0F0F, (high >> 4) & 0x0F0F0F0F, 0x5140)
        left = a if BEGIN == 0 else b if BEGIN == 4 else c
        right = b if BEGIN == 0 else c if BEGIN == 4 else a
        if nonce is not None and chunk == 0:
            kept = nonce.to(tl.uint32)
            kept = chosen(kept & 0x0F0F0F0F, (kept >> 4) & 0x0F0F0F0F, 0x5140)
            right = tl.where(group == 1, kept, right)
        bits = pairs(tl.where(place < 4, left[:, :, None], right[:, :, None]), place, KIND)
    else:
        word = eight(low, high, BEGIN)
        if EACH == 8:
            if nonce is not None and chunk == 0:
                kept = (word & 0xFFFF) | (nonce.to(tl.uint32) << 16)
                word = tl.where(group == 1, kept, word)
            word = word[:, :, None]
        else:
            second = eight(low, high, (BEGIN + 8) % 12)
            if nonce is not None and chunk == 0:
                kept = (second & 0xFFFF) | (nonce.to(tl.uint32) << 16)
                second = tl.where(group == 0, kept, second)
            word = tl.where(place < 8, word[:, :, None], second[:, :, None])
        bits = encode(word, place % 8, KIND)
        for lane in tl.static_range(1, PACK):
            bits |= encode(word, place % 8 + lane, KIND) << (lane * WIDTH)
    # As many axes as the addresses have: Triton then gives neighbouring words to neighbouring
    # threads, and an access of a warp is of whole rows.
    return tl.reshape(bits, [low.shape[0], LANES // PACK])


@triton.jit
def program(heads, layers, SIDES: tl.constexpr, INSIDE: tl.constexpr):
    """Return (tile, side, head, layer) of this program in a grid of `paged.Launch.grid`.

    Where blocks have all layers (INSIDE), neighbouring programs handle layers of the same blocks.
    Otherwise all programs that run at the same time would access the same part of each block, and
    those parts, as far apart as blocks are large, may be in few of the memory's channels.
    """
    index = tl.program_id(0).to(tl.uint32)  # quicker to divide
    layer = tl.program_id(1)
    if INSIDE:
        rest = index // layers.to(tl.uint32)
        layer = (index - rest * layers.to(tl.uint32)).to(tl.int32)
        index = rest
    rest = index // heads.to(tl.uint32)
    head = (index - rest * heads.to(tl.uint32)).to(tl.int32)
    side = (rest % SIDES).to(tl.int32)
    return (rest // SIDES).to(tl.int32), side, head, layer.to(tl.int64)


@triton.jit
def origin_of(where, layer, ALIGN: tl.constexpr, PACK: tl.constexpr):
    """Return the distance of a layer from the first, in integers of PACK elements."""
    away = tl.multiple_of(tl.load(where + 2 * layer), ALIGN)
    # A division by 1 is dropped, and with it what is said about its result.
    return away if PACK == 1 else tl.multiple_of(away // PACK, ALIGN // PACK)


@triton.jit
def slots_of(ids, item, count, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the slots of items: of a slot mapping, or with BLOCKS of all slots of listed blocks.

    Negative for padding and beyond the end.
    """
    if BLOCKS:
        block = tl.load(ids + item // SIZE, mask=item < count, other=-1)
        return tl.where(block < 0, -1, block * SIZE + item % SIZE)
    else:
        return tl.load(ids + item, mask=item < count, other=-1)


@triton.jit
def distance(slot, limit, block_stride, slot_stride, SIZE: tl.constexpr):
    """Return (elements from the layer's first to the slot's first, whether the slot exists).

    The distance of a slot that does not exist means nothing.
    """
    exists = slot.to(tl.uint64, bitcast=True) < limit.to(tl.uint64)
    # A cache has fewer than 2^31 slots, and 64-bit division is slow.
    near = slot.to(tl.uint32)
    return (near // SIZE).to(tl.int64) * block_stride + (near % SIZE).to(
        tl.int64
    ) * slot_stride, exists
