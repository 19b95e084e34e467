# SPDX-License-Identifier: Apache-2.0
"""The layers of a paged KV cache as views [layer, block, head, slot in block, side, element]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from kvconform.kernels.codes import MIN_HEAD_DIM
from kvconform.kernels.layout import Layout
from kvconform.kernels.wide import wider

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers as which an element's bits are handled, by its size.

torch supports hardly any arithmetic on fp8, and NaN differs from itself.
"""
KINDS = {
    torch.uint8: 0,
    torch.float8_e4m3fn: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float32: 4,
}
"""The dtypes of a cache, with their numbers in the Triton kernels."""
HEADS = 4096
"""Number of heads' keys per layer and side."""


@dataclass(frozen=True)
class Stack:
    """Layers a constant distance apart in one storage.

    `bits` [layers, blocks, heads, block size, sides, dim]: integers, with arbitrary strides.
    `start`: place of the first layer in the cache's list. `firsts`: see `first_key`.
    """

    bits: torch.Tensor
    start: int
    firsts: tuple[int, ...]


class Words(NamedTuple):
    """A layer's bits in integers of `pack` elements, with their strides (`strides_of`)."""

    bits: torch.Tensor
    strides: tuple[int, ...]
    pack: int


@dataclass(frozen=True)
class Launch:
    """Layers of the same shape and strides, anywhere in memory, for one launch of a kernel.

    `base`: the first layer's bits [blocks, heads, block size, sides, dim]. `where` [layers, 2]
    int64 on the device: distance from `base` in elements, and `first_key`. `start`: place of the
    first layer in the cache's list. `align`: a power of two up to 16 that divides all distances.
    `inside`: whether each block has all layers.
    """

    base: torch.Tensor
    where: torch.Tensor
    start: int
    align: int
    inside: bool

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of (blocks, heads, slots, sides, elements), see `strides_of`."""
        return strides_of(self.base)

    @cached_property
    def units(self) -> Words:
        """The layer's bits in integers of at most 4 bytes."""
        return self._words(4)

    @cached_property
    def words(self) -> Words:
        """The layer's bits in integers of at most 8 bytes."""
        return self._words(8)

    @cached_property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.where)

    def grid(self, programs: int) -> tuple[int, int]:
        """Return the grid of a launch of as many programs per layer, for `device.program`."""
        return (programs * self.layers, 1) if self.inside else (programs, self.layers)

    def _words(self, most: int) -> Words:
        """Return the layer's bits in integers as wide as all layers permit.

        Their size divides the distances of all layers.
        """
        base = self.base.as_strided(self.base.shape, self.strides, self.base.storage_offset())
        (bits,) = wider(base, most=min(most, self.align * base.element_size()))
        return Words(bits, strides_of(bits), bits.element_size() // base.element_size())


class Paged:
    """A paged KV cache: layers of the same geometry, over memory that it does not own.

    The constructor reads shapes and strides and, on CUDA, copies a table of 16 bytes per layer to
    the device; it changes nothing. The kernels use the memory that the tensors have at
    construction, so reallocated tensors need a new object.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        layout: str | Layout,
        numbers: Sequence[int] | None = None,
        first_head: int = 0,
    ) -> None:
        """Describe the cache of `layers`, one tensor per layer in this layout.

        `numbers`: the layers' numbers in the model; 0, 1, ... by default. `first_head`: the first
        head's number in the model, if it is split over several caches. Both are part of the codes.
        ValueError for tensors of different shape, dtype or device, for a dtype that is not
        in `KINDS`, and for sizes that no kernel supports (dim below 16, more than 2^31 - 1 slots,
        4096 heads or more).
        """
        self.layout = layout if isinstance(layout, Layout) else Layout.named(layout)
        if not layers:
            raise ValueError("a paged cache has at least one layer")
        self.numbers = tuple(range(len(layers)) if numbers is None else numbers)
        if len(self.numbers) != len(layers):
            raise ValueError(f"{len(layers)} layers need as many numbers, not {len(self.numbers)}")
        first = layers[0]
        self.dtype, self.device = first.dtype, first.device
        if self.dtype not in KINDS:
            supported = ", ".join(str(dtype) for dtype in KINDS)
            raise ValueError(f"a cache of {self.dtype} is not supported: {supported} are")
        for layer in layers:
            if (layer.shape, layer.dtype, layer.device) != (first.shape, first.dtype, first.device):
                raise ValueError(
                    "all layers of a paged cache must have one shape, one dtype and one device"
                )
        views = [self.layout.view(layer.view(BITS[self.itemsize])) for layer in layers]
        self.blocks, self.heads, self.size, self.sides, self.dim = views[0].shape
        if self.dim < MIN_HEAD_DIM:
            raise ValueError(
                f"a head must have at least {MIN_HEAD_DIM} elements to hold a code, not {self.dim}"
            )
        if self.slots >= 1 << 31:
            raise ValueError(f"a cache must have fewer than 2^31 slots, not {self.slots}")
        if first_head + self.heads >= HEADS:
            raise ValueError(
                f"codes distinguish fewer than {HEADS} heads, not {first_head + self.heads}"
            )
        self.firsts = tuple(first_key(number, first_head) for number in self.numbers)
        self.stacks = tuple(self._stacks(views))
        self.launches = tuple(self._launches(views))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def slots(self) -> int:
        """Slots of a layer: a slot is block * size + place in the block."""
        return self.blocks * self.size

    @property
    def kind(self) -> int:
        """The dtype's number in `KINDS`."""
        return KINDS[self.dtype]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in one layer."""
        return self.heads * self.sides * self.dim * self.itemsize

    def _stacks(self, views: list[torch.Tensor]) -> list[Stack]:
        groups: list[list[int]] = []
        for number, view in enumerate(views):
            group = groups[-1] if groups else []
            before = [views[i] for i in group[-2:]]
            if before and _continues(before, view):
                group.append(number)
            else:
                groups.append([number])
        stacks = []
        for group in groups:
            first = views[group[0]]
            step = _gap(first, views[group[1]]) if len(group) > 1 else 0
            bits = first.as_strided(
                (len(group), *first.shape), (step, *first.stride()), first.storage_offset()
            )
            stacks.append(Stack(bits, group[0], self.firsts[group[0] : group[-1] + 1]))
        return stacks

    def _launches(self, views: list[torch.Tensor]) -> list[Launch]:
        launches = []
        begin = 0
        for end in range(1, len(views) + 1):
            base = views[begin]
            if (
                end < len(views)
                and views[end].stride() == base.stride()
                and _bytes(base, views[end]) % self.itemsize == 0
            ):
                continue
            away = [_bytes(base, view) // self.itemsize for view in views[begin:end]]
            align = 16
            while any(distance % align for distance in away):
                align //= 2
            table = torch.tensor(
                list(zip(away, self.firsts[begin:end], strict=True)), dtype=torch.int64
            )
            inside = 0 < max(away) - min(away) < base.stride(0)
            launches.append(Launch(base, table.to(self.device), begin, align, inside))
            begin = end
        return launches

    def check_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Return `slots` contiguous. ValueError unless they are [n] int64 on the cache's device.

        On the CPU also ValueError for a slot beyond the last. On CUDA that check would make the
        host wait; see `validate`.
        """
        return self._check(slots, self.slots, "slots", "slot")

    def check_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return `blocks` contiguous; errors as in `check_slots`."""
        return self._check(blocks, self.blocks, "blocks", "block")

    def _check(self, ids: torch.Tensor, limit: int, what: str, one: str) -> torch.Tensor:
        if ids.dim() != 1 or ids.dtype != torch.int64:
            raise ValueError(f"{what} must be one axis of int64, not {ids.dim()} of {ids.dtype}")
        if ids.device != self.device:
            raise ValueError(
                f"{what} must be on the cache's device, {self.device}, not on {ids.device}"
            )
        if ids.device.type == "cpu" and len(ids) and int(ids.max()) >= limit:
            raise ValueError(f"{one} {int(ids.max())} does not exist: the cache has {limit}")
        return ids.contiguous()

    def check_content(self, content: torch.Tensor, count: int) -> torch.Tensor:
        """Return `content` contiguous, as int64.

        ValueError unless it is [count] int64 or uint64 on the cache's device.
        """
        if content.dtype == torch.uint64:
            content = content.view(torch.int64)
        if content.shape != (count,) or content.dtype != torch.int64:
            raise ValueError(
                f"content must be {count} ids of int64 or uint64,"
                f" not {tuple(content.shape)} of {content.dtype}"
            )
        if content.device != self.device:
            raise ValueError(
                f"content must be on the cache's device, {self.device}, not on {content.device}"
            )
        return content.contiguous()

    def validate(self, slots: torch.Tensor) -> None:
        """Raise ValueError for a slot beyond the last. On CUDA the host waits for the device."""
        if len(slots) and int(slots.max()) >= self.slots:
            raise ValueError(f"slot {int(slots.max())} does not exist: the cache has {self.slots}")


def first_key(number: int, first_head: int) -> int:
    """Return the number of the key of a layer's first head, for K (see `codes.CodeBook`).

    That of V is HEADS more, that of another head as many more as the head is behind the first.
    """
    return 1 + number * 2 * HEADS + first_head


def strides_of(bits: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, 0 for axes of one entry.

    The strides of such axes mean nothing, and could hide from a compiler that rows are aligned.
    """
    return tuple(
        0 if length == 1 else stride
        for length, stride in zip(bits.shape, bits.stride(), strict=True)
    )


def _continues(before: list[torch.Tensor], view: torch.Tensor) -> bool:
    """Return whether a view continues the last one or two views of a stack."""
    last = before[-1]
    if last.stride() != view.stride() or _storage(last) != _storage(view):
        return False
    gap = _gap(last, view)
    return gap >= 0 and (len(before) < 2 or _gap(before[0], last) == gap)


def _storage(view: torch.Tensor) -> int:
    return view.untyped_storage().data_ptr()


def _gap(one: torch.Tensor, other: torch.Tensor) -> int:
    return other.storage_offset() - one.storage_offset()


def _bytes(one: torch.Tensor, other: torch.Tensor) -> int:
    return other.data_ptr() - one.data_ptr()
