# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""What the Triton kernels share: whether there is Triton, how a launch is cut into programs, and the code of a lane on the device.

A program handles TILE slots of one layer, head and side: a tile of rows, each contiguous where the layout has it so, in CHUNKS chunks of
LANES elements. Programs that differ only in the head are neighbours, so that a token whose heads lie together is written together.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the torch path does everything

    class _Absent:
        """Stands for Triton where it is not installed; kernels are then plain functions that nobody calls."""

        constexpr: Any = None

        @staticmethod
        def jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
            return function if function is not None else lambda given: given

    triton = tl = _Absent()
    AVAILABLE = False
else:
    AVAILABLE = True

INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"
"""The kernels run in Triton's interpreter, on the CPU: for tests."""
__all__ = [
    "AVAILABLE",
    "EACH",
    "INTERPRETED",
    "Cut",
    "choose",
    "distance",
    "encode",
    "expected",
    "lanes_of",
    "mix",
    "on",
    "program",
    "slots_of",
    "tl",
    "triton",
]
ROW_BYTES = 128
"""How much of a row a program's warps access at once: whole lines, of four rows, so that few threads compute the same row's code."""
TILE_BYTES = 16384
"""Bytes of a program's tile: 128 per thread with 4 warps, so eight accesses of 16 bytes each."""
TILE_ROWS = 64
EACH = {1: 16, 2: 8, 4: 8}
"""By size of an element: lanes that a code is computed for at a time, so that a thread has 16 bytes of a row together."""


def choose(device: torch.device, backend: str | None) -> bool:
    """True for Triton, False for torch. `backend`: "triton", "torch" or None, which takes Triton for CUDA where it is installed.

    ValueError for another name, and for Triton where it is missing or the tensors are on the CPU (except in the interpreter).
    """
    if backend not in (None, "torch", "triton"):
        raise ValueError(f'a backend is "torch" or "triton", not {backend!r}')
    able = AVAILABLE and (device.type == "cuda" or INTERPRETED)
    if backend == "triton" and not able:
        raise ValueError(
            "Triton is not installed"
            if not AVAILABLE
            else f"Triton cannot run on {device} (TRITON_INTERPRET=1 is not set)"
        )
    return able and (backend == "triton" or device.type == "cuda")


def on(device: torch.device) -> Any:
    """Context in which launches go to this device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@dataclass(frozen=True)
class Cut:
    """How a launch is cut: a program handles `tile` rows of a head's K or V, in `chunks` chunks of `lanes` elements.

    `even`: no row ends inside a chunk.
    """

    tile: int
    lanes: int
    chunks: int
    even: bool

    @classmethod
    def of(cls, rows: int, dim: int, itemsize: int) -> Cut:
        """For `rows` rows of `dim` elements."""
        most = min(ROW_BYTES // itemsize, 1 << (dim - 1).bit_length())
        lanes = most
        while (
            dim % lanes and lanes * itemsize > 64
        ):  # 96 elements are three times 32 rather than twice 64
            lanes //= 2
        if dim % lanes:
            lanes = most
        chunks = -(-dim // lanes)
        tile = 16
        while tile < TILE_ROWS and 2 * tile * chunks * lanes * itemsize <= TILE_BYTES:
            tile *= 2
        return cls(min(tile, 1 << max(0, rows - 1).bit_length()), lanes, chunks, dim % lanes == 0)

    def programs(self, rows: int, heads: int, sides: int) -> int:
        """Programs per layer."""
        return -(-rows // self.tile) * heads * sides


@triton.jit
def mix(value):
    """`codes.mix64` of uint64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def encode(nibble, KIND: tl.constexpr):
    """Bits of the integers 0..15 (int32) in the dtype of this kind, as int32.

    The float comes of adding and taking away 2^23 rather than of a conversion, which costs more; the narrower formats are its upper
    bits with another bias, which 0 would fall below.
    """
    if KIND == 0:
        return nibble
    else:
        bits = ((nibble | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0).to(
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
def eight(low, high, begin):
    """Eight nibbles (uint32) of codes from nibble `begin` (0, 4 or 8) on, the first after the last; `low` has eight, `high` four."""
    return tl.where(
        begin == 0, low, tl.where(begin == 4, (low >> 16) | (high << 16), high | (low << 16))
    )


@triton.jit
def expected(content, number, side, head, group, nonce, KIND: tl.constexpr, EACH: tl.constexpr):
    """Bits [rows, groups, EACH] (int32) that content ids [rows] int64 have in these groups [groups] of EACH lanes of one head's K or V.

    EACH is 8 or 16. What depends on the row is computed per row, what depends on the group per group; an element takes a shift, a mask
    and its float.
    """
    key = mix((1 + (number * 2 + side) * 4096 + head).to(tl.uint64))
    code = mix(content.to(tl.uint64, bitcast=True) ^ key)
    low = (code & 0xFFFFFFFF).to(tl.uint32)[:, None]
    high = ((code >> 32) & 0xFFFF).to(tl.uint32)[:, None]
    begin = (group * EACH % 12)[None, :]
    place = tl.arange(0, EACH)[None, None, :]
    kept = (nonce.to(tl.uint32) & 0xFFFF) << 16
    if EACH == 8:
        word = eight(low, high, begin)
        word = tl.where((group == 1)[None, :], (word & 0xFFFF) | kept, word)[:, :, None]
    else:
        word = eight(low, high, begin)[:, :, None]
        second = eight(low, high, tl.where(begin == 4, 0, tl.where(begin == 0, 8, 4)))
        second = tl.where((group == 0)[None, :], (second & 0xFFFF) | kept, second)[:, :, None]
        word = tl.where(place < 8, word, second)
    return encode(((word >> (place % 8 * 4).to(tl.uint32)) & 15).to(tl.int32), KIND)


@triton.jit
def program(heads, SIDES: tl.constexpr):
    """(which tile, side, head) this program is for."""
    index = tl.program_id(0)
    rest = index // heads
    return rest // SIDES, rest % SIDES, index % heads


@triton.jit
def lanes_of(group, EACH: tl.constexpr):
    """Lanes [1, groups, EACH] of groups [groups]."""
    return (group[:, None] * EACH + tl.arange(0, EACH)[None, :])[None, :, :]


@triton.jit
def slots_of(ids, item, count, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    """Slots of the items: those of a slot mapping, or with BLOCKS those of all slots of a list of blocks. Negative for padding and beyond
    the end."""
    if BLOCKS:
        block = tl.load(ids + item // SIZE, mask=item < count, other=-1)
        return tl.where(block < 0, -1, block * SIZE + item % SIZE)
    else:
        return tl.load(ids + item, mask=item < count, other=-1)


@triton.jit
def distance(slot, limit, block_stride, slot_stride, SIZE: tl.constexpr):
    """(elements from the layer's first to the slot's first, whether the slot exists)."""
    exists = (slot >= 0) & (slot < limit)
    near = tl.where(exists, slot, 0).to(
        tl.uint32
    )  # a cache has fewer than 2^31 slots, and 64-bit division is slow
    return (near // SIZE).to(tl.int64) * block_stride + (near % SIZE).to(
        tl.int64
    ) * slot_stride, exists
