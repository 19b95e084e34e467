# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Verify that slots of a cache hold the expected codes, bit for bit, without a copy to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvconform.kernels import lanes
from kvconform.kernels.blocks import in_threads, whole, widened, wrong_blocks
from kvconform.kernels.codes import NONCE_LANES
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
from kvconform.kernels.paged import Paged, Stack
from kvconform.kernels.rows import fetch, pieces

LAST = 1 << 62
"""The first mismatch is stored as LAST minus its index: 0 means none, the maximum is the first."""


class Mismatch(NamedTuple):
    """One element that differs.

    `item`: index into the slot mapping. `layer`: place in the cache's list of layers. `side`: 0 is
    K.
    """

    item: int
    layer: int
    head: int
    side: int
    lane: int


@dataclass(frozen=True)
class Verdict:
    """Result of a verification, on the cache's device.

    Only `first` and `holds` make the host wait for the device. `found` [2 + n] int64: number of
    elements that differ, LAST minus the index of the first, number of elements that differ by slot.
    """

    found: torch.Tensor
    shape: tuple[int, int, int, int]
    """(layers, heads, sides, dim)"""

    @property
    def count(self) -> torch.Tensor:
        """Number of elements that differ, a scalar on the device."""
        return self.found[0]

    @property
    def wrong(self) -> torch.Tensor:
        """Number of elements of each slot that differ, [n] int64 on the device; 0 for padding."""
        return self.found[2:]

    def holds(self) -> bool:
        """Return True if nothing differs. The host waits for the device."""
        return not int(self.count)

    def first(self) -> Mismatch | None:
        """Return the first element that differs, in the order of `Mismatch`, or None.

        The host waits for the device.
        """
        noted = int(self.found[1])
        if not noted:
            return None
        index = LAST - noted
        places = []
        for length in reversed(self.shape):
            index, place = divmod(index, length)
            places.append(place)
        return Mismatch(index, *reversed(places))


def verify(
    paged: Paged, slots: torch.Tensor, content: torch.Tensor, backend: str | None = None
) -> Verdict:
    """Compare slots [n] int64 with the codes of `content` [n] (int64 or uint64).

    All layers, heads and sides are compared, bit for bit: -0.0 is not 0.0. The nonce lanes are
    ignored. Negative slots are padding and are skipped. Changes nothing.

    ValueError for tensors of another shape, dtype or device, and on the CPU for a slot beyond the
    last. On CUDA all elements of such a slot count as different, and the host does not wait: there
    are two launches for all layers of the same strides, one of which clears the result. Without
    Triton, torch's operations are used on CUDA too, and some of them wait.
    """
    slots = paged.check_slots(slots)
    content = paged.check_content(content, len(slots))
    found = torch.zeros(2 + len(slots), dtype=torch.int64, device=paged.device)
    (verify_triton if choose(paged.device, backend) else verify_torch)(paged, slots, content, found)
    return Verdict(found, (len(paged.numbers), paged.heads, paged.sides, paged.dim))


def verify_torch(
    paged: Paged,
    slots: torch.Tensor,
    content: torch.Tensor,
    found: torch.Tensor,
    quick: bool = True,
) -> None:
    """Compute `verify` in plain torch, for checked arguments; add to `found`.

    `quick`: first check whether a piece is right as a whole, as most are. The result does not
    depend on it.
    """
    deep, row = len(paged.numbers), paged.heads * paged.sides * paged.dim
    beyond = (slots >= paged.slots).nonzero().flatten()
    if len(beyond):
        found[2 + beyond] = deep * paged.heads * paged.sides * (paged.dim - NONCE_LANES)
        _note(found, int(beyond[0]) * deep * row)
    left = slots
    if quick and paged.device.type == "cpu" and paged.dim % lanes.GROUP == 0:
        left = _sweep(paged, slots, content)
    for stack, mine in pieces(paged, left):
        prints = lanes.fingerprints(
            content[mine], lanes.keys(stack.firsts, paged.heads, paged.sides, paged.device)
        )
        have = fetch(stack.bits, slots[mine])
        if quick and paged.dim % lanes.GROUP == 0 and _agrees(have, prints, paged.dtype):
            continue
        have = fetch(stack.bits, slots[mine])  # the quick check has overwritten it
        wrong = (have != lanes.plain(prints, paged.dim, paged.dtype)) & lanes.content_lanes(
            paged.dim, paged.device
        )
        found[2 + mine] += wrong.flatten(1).sum(1)
        each = wrong[0].numel()
        places = wrong.flatten().nonzero().flatten()
        if len(places):
            item, rest = divmod(int(places[0]), each)
            _note(found, (int(mine[item]) * deep + stack.start) * row + rest)
    found[0] = found[2:].sum()


def _sweep(paged: Paged, slots: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Return `slots` with padding in place of all whole blocks that hold the right codes."""
    begins, left = whole(slots, paged.size)
    stacks = [wide for stack in paged.stacks if (wide := widened(stack))]
    if not len(begins) or len(stacks) < len(paged.stacks):
        return slots
    begins = begins[slots[begins].argsort()]  # reading in the order of memory is fastest
    ids = content[begins[:, None] + torch.arange(paged.size)]
    blocks = slots[begins] // paged.size
    parts = [part for stack in stacks for part in _parts(stack, len(blocks))]

    def look(part: tuple[Stack, torch.Tensor]) -> torch.Tensor:
        stack, mine = part
        return mine[wrong_blocks(stack, paged.dtype, blocks[mine], ids[mine])]

    wrong = torch.cat(in_threads(look, parts, len(slots) * len(paged.numbers) * paged.slot_bytes))
    rest = torch.full_like(slots, -1)
    again = (begins[wrong][:, None] + torch.arange(paged.size)).flatten()
    for some in (left, again):
        rest[some] = slots[some]
    return rest


def _parts(stack: Stack, count: int) -> list[tuple[Stack, torch.Tensor]]:
    """Return the stack with indices of `count` blocks, in as many parts as torch has threads."""
    return [(stack, part) for part in torch.arange(count).chunk(torch.get_num_threads())]


def _note(found: torch.Tensor, index: int) -> None:
    found[1] = max(int(found[1]), LAST - index)


def _agrees(have: torch.Tensor, prints: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if rows [..., dim] hold the codes of fingerprints [...]; the nonce is ignored.

    The nonce lanes are replaced by those that would follow without a nonce. A row then repeats its
    first twelve lanes. These are compared with the code, and all others with the lanes twelve
    before them. Overwrites `have`.
    """
    unit = lanes.UNITS[dtype.itemsize]
    have, twelve = have.view(unit), lanes.groups(prints, dtype)
    period = twelve.shape[-1]
    each = period // 3
    have[..., period : period + each] = twelve[..., :each]
    twelve ^= have[..., :period]
    rest = have[..., period:] ^ have[..., :-period]
    return not _any(twelve) and not _any(rest)


def _any(bits: torch.Tensor) -> bool:
    """Return True if a bit is set, by the greatest byte, which is faster than `any`."""
    return bool(bits.view(torch.uint8).max()) if bits.numel() else False


def verify_triton(
    paged: Paged, slots: torch.Tensor, content: torch.Tensor, found: torch.Tensor
) -> None:
    """Compute `verify` with the Triton kernel, for checked arguments; add to `found`."""
    count = len(slots)
    if not count:
        return
    cut = Cut.of(count, paged.dim, paged.itemsize)
    with on(paged.device):
        for launch in paged.launches:
            units = launch.units
            programs = cut.programs(count, paged.heads, paged.sides)
            start(
                verify_kernel,
                launch.grid(programs),
                (units.bits, launch.where, slots, content, found),
                (
                    count,
                    paged.slots,
                    paged.heads,
                    launch.layers,
                    len(paged.numbers),
                    launch.start,
                ),
                (
                    *units.strides,
                    paged.dim,
                    paged.kind,
                    paged.sides,
                    paged.size,
                    launch.align,
                    launch.inside,
                    *cut,
                    EACH[paged.itemsize],
                    units.pack,
                    LAST,
                ),
            )


@triton.jit(do_not_specialize=["count", "limit", "heads", "layers", "all_layers", "begin"])
def verify_kernel(
    cache,
    where,
    slots,
    content,
    found,
    count,
    limit,
    heads,
    layers,
    all_layers,
    begin,
    block_stride,
    head_stride,
    slot_stride,
    side_stride,
    lane_stride,
    dim,
    KIND: tl.constexpr,
    SIDES: tl.constexpr,
    SIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    INSIDE: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    EACH: tl.constexpr,
    PACK: tl.constexpr,
    LAST: tl.constexpr,
) -> None:
    """Add to `found`. Grid as in `write_kernel`. A program whose tile is right writes nothing.

    The cache is given as in `write_kernel`, but `dim` counts its elements.
    """
    tile, side, head, layer = program(heads, layers, SIDES, INSIDE)
    origin = origin_of(where, layer, ALIGN, PACK)
    first = tl.load(where + 2 * layer + 1)
    item = tile * TILE + tl.arange(0, TILE)
    slot = slots_of(slots, item, count, SIZE, False)
    away, exists = distance(slot, limit, block_stride, slot_stride, SIZE)
    here = cache + origin + head.to(tl.int64) * head_stride + side.to(tl.int64) * side_stride + away
    WIDTH: tl.constexpr = 8 if KIND < 2 else 16 if KIND < 4 else 32
    ONES: tl.constexpr = -1 if WIDTH == 32 else (1 << WIDTH) - 1
    # All loads come first, and what is compared with them is computed meanwhile. The compiler would
    # issue them later, but for a barrier before that begins.
    have = ()
    for chunk in tl.static_range(0, CHUNKS):
        bits = loaded(here, exists, chunk, lane_stride, dim, LANES, EVEN, PACK)
        have += (bits,)  # type: ignore[assignment]
    tl.debug_barrier()
    ids = tl.load(content + item, mask=item < count, other=0)
    low, high = turned(ids, first, side, head, LANES, EACH)
    bits = tl.zeros([TILE, LANES // PACK], tl.int32)
    for chunk in tl.static_range(0, CHUNKS):
        want = expected(low, high, chunk, None, KIND, LANES, EACH, PACK)
        differs = (have[chunk] ^ want.to(cache.dtype.element_ty)).to(tl.int32)
        if EVEN and chunk * LANES >= 16:
            bits |= differs
        else:
            lane = chunk * LANES + tl.arange(0, LANES // PACK) * PACK
            bits |= differs & compared(lane, dim, WIDTH, ONES, PACK)[None, :]
    known, beyond = tl.where(exists, -1, 0), tl.where((slot >= 0) & ~exists, -1, 0)
    # Rare, so the work is repeated rather than kept in registers.
    if tl.reduce_or((bits & known[:, None]) | beyond[:, None], axis=None) != 0:
        many = tl.zeros([TILE, LANES // PACK], tl.int32)
        least = tl.full([TILE], 1 << 30, tl.int32)
        for chunk in tl.static_range(0, CHUNKS):
            want = expected(low, high, chunk, None, KIND, LANES, EACH, PACK)
            bits = loaded(here, exists, chunk, lane_stride, dim, LANES, EVEN, PACK)
            bits = (bits ^ want.to(bits.dtype)).to(tl.int32)
            bits = (bits & known[:, None]) | beyond[:, None]
            lane = chunk * LANES + tl.arange(0, LANES // PACK) * PACK
            bits &= compared(lane, dim, WIDTH, ONES, PACK)[None, :]
            for place in tl.static_range(0, PACK):
                one = (bits >> (place * WIDTH)) & ONES
                least = tl.minimum(
                    least, tl.min(tl.where(one != 0, lane[None, :] + place, 1 << 30), axis=1)
                )
                many += tl.where(one != 0, 1, 0)
        wrong = tl.sum(many, axis=1)
        tl.atomic_add(found + 2 + item, wrong.to(tl.int64), mask=item < count)
        tl.atomic_add(found, tl.sum(wrong, axis=0).to(tl.int64))
        row = ((item.to(tl.int64) * all_layers + begin + layer) * heads + head) * SIDES + side
        tl.atomic_max(found + 1, tl.max(tl.where(wrong > 0, LAST - (row * dim + least), 0), axis=0))


@triton.jit
def loaded(
    here,
    exists,
    chunk,
    lane_stride,
    dim,
    LANES: tl.constexpr,
    EVEN: tl.constexpr,
    PACK: tl.constexpr,
):
    """Return the integers [rows, LANES / PACK] of a chunk; 0 for rows that do not exist."""
    word = (chunk * (LANES // PACK) + tl.arange(0, LANES // PACK))[None, :]
    mask = exists[:, None] if EVEN else exists[:, None] & (word * PACK < dim)
    return tl.load(here[:, None] + word.to(tl.int64) * lane_stride, mask=mask, other=0)


@triton.jit
def compared(lane, dim, WIDTH: tl.constexpr, ONES: tl.constexpr, PACK: tl.constexpr):
    """Return the bits (int32) that are compared in integers that begin with lanes [n].

    They are those of PACK elements of WIDTH bits, without the nonce and what is beyond `dim`.
    """
    bits = lane * 0
    for place in tl.static_range(0, PACK):
        mine = lane + place
        lives = ((mine < 12) | (mine >= 16)) & (mine < dim)
        bits |= tl.where(lives, ONES, 0) << (place * WIDTH)
    return bits
