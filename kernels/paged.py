# SPDX-License-Identifier: Apache-2.0
"""The layers of a paged KV cache, as the kernels see them: which bytes belong to (layer, block, head, slot in block, side, element)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvconform.kernels.codes import MIN_HEAD_DIM
from kvconform.kernels.layout import Layout

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By size of an element: the integers that its bits are handled as (there is hardly any arithmetic on fp8, and NaN differs from itself)."""
KINDS = {
    torch.uint8: 0,
    torch.float8_e4m3fn: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float32: 4,
}
"""The dtypes of a cache, by the number that the Triton kernels know them by."""


@dataclass(frozen=True)
class Stack:
    """Layers a constant distance apart in one storage: `bits` [layers, blocks, heads, block size, sides, dim], integers, any strides.
    `start`: place of the first in the cache's list of layers. `numbers`: their numbers in the model."""

    bits: torch.Tensor
    start: int
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """Layers of one shape and one set of strides, wherever they lie: what one launch of a kernel covers.

    `base`: the first layer's bits [blocks, heads, block size, sides, dim]. `where` [layers, 2] int64 on the device: distance from `base`
    in elements, number in the model. `align`: a power of two up to 16 that divides all distances.
    """

    base: torch.Tensor
    where: torch.Tensor
    start: int
    align: int

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of (blocks, heads, slots, sides, elements), see `strides_of`."""
        return strides_of(self.base)


class Paged:
    """A paged KV cache: layers of one geometry over memory that somebody else owns.

    Construction looks at shapes and strides and, on CUDA, copies a table of 16 bytes per layer to the device; it changes nothing. All
    calls of the kernels with this object use the memory that the tensors have now: make a new one when they are reallocated.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        layout: str | Layout,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """`layers`: one tensor per layer, as `layout` says. `numbers`: of these layers in the model, by default 0, 1, ...: they go into the
        codes. ValueError for tensors of different shape, dtype or device, for another dtype than `KINDS` has, and for sizes that no
        kernel takes (dim below 16, more than 2^31 - 1 slots, 4096 heads or more)."""
        self.layout = layout if isinstance(layout, Layout) else Layout.named(layout)
        if not layers:
            raise ValueError("a paged cache has at least one layer")
        self.numbers = tuple(range(len(layers)) if numbers is None else numbers)
        if len(self.numbers) != len(layers):
            raise ValueError(f"{len(layers)} layers need as many numbers, not {len(self.numbers)}")
        first = layers[0]
        self.dtype, self.device = first.dtype, first.device
        if self.dtype not in KINDS:
            raise ValueError(
                f"a cache of {self.dtype} is not supported: {', '.join(str(dtype) for dtype in KINDS)} are"
            )
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
        if self.heads >= 4096:
            raise ValueError(f"codes tell fewer than 4096 heads apart, not {self.heads}")
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
        """Bytes that one slot has in one layer."""
        return self.heads * self.sides * self.dim * self.itemsize

    def _stacks(self, views: list[torch.Tensor]) -> list[Stack]:
        groups: list[list[int]] = []
        for number, view in enumerate(views):
            group = groups[-1] if groups else []
            before = [views[i] for i in group[-2:]]
            same = (
                bool(before)
                and before[-1].stride() == view.stride()
                and _storage(before[-1]) == _storage(view)
            )
            if (
                same
                and (len(before) < 2 or _gap(before[0], before[1]) == _gap(before[1], view))
                and _gap(before[-1], view) >= 0
            ):
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
            stacks.append(Stack(bits, group[0], self.numbers[group[0] : group[-1] + 1]))
        return stacks

    def _launches(self, views: list[torch.Tensor]) -> list[Launch]:
        launches = []
        begin = 0
        for end in range(1, len(views) + 1):
            if (
                end < len(views)
                and views[end].stride() == views[begin].stride()
                and not _bytes(views[begin], views[end]) % self.itemsize
            ):
                continue
            base = views[begin]
            away = [_bytes(base, view) // self.itemsize for view in views[begin:end]]
            align = 16
            while any(distance % align for distance in away):
                align //= 2
            table = torch.tensor(
                list(zip(away, self.numbers[begin:end], strict=True)), dtype=torch.int64
            )
            launches.append(Launch(base, table.to(self.device), begin, align))
            begin = end
        return launches

    def check_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """`slots` [n] int64 on the cache's device, contiguous. ValueError when they are something else or, on the CPU, when one is
        beyond the last. On CUDA that is not looked at, for it would need the host to wait: see `validate`."""
        return self._check(slots, self.slots, "slots", "slot")

    def check_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """`blocks` [n] int64 on the cache's device, contiguous; errors as of `check_slots`."""
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
        """`content` [count] as int64 on the cache's device, contiguous. ValueError when it is something else."""
        if content.dtype == torch.uint64:
            content = content.view(torch.int64)
        if content.shape != (count,) or content.dtype != torch.int64:
            raise ValueError(
                f"content must be {count} ids of int64 or uint64, not {tuple(content.shape)} of {content.dtype}"
            )
        if content.device != self.device:
            raise ValueError(
                f"content must be on the cache's device, {self.device}, not on {content.device}"
            )
        return content.contiguous()

    def validate(self, slots: torch.Tensor) -> None:
        """ValueError when a slot is beyond the last. On CUDA the host waits for the device."""
        if len(slots) and int(slots.max()) >= self.slots:
            raise ValueError(f"slot {int(slots.max())} does not exist: the cache has {self.slots}")


def strides_of(bits: torch.Tensor) -> tuple[int, ...]:
    """Strides of a tensor, 0 for axes of one entry: theirs mean nothing, and a compiler could not see past them that rows are aligned."""
    return tuple(
        0 if length == 1 else stride
        for length, stride in zip(bits.shape, bits.stride(), strict=True)
    )


def _storage(view: torch.Tensor) -> int:
    return view.untyped_storage().data_ptr()


def _gap(one: torch.Tensor, other: torch.Tensor) -> int:
    return other.storage_offset() - one.storage_offset()


def _bytes(one: torch.Tensor, other: torch.Tensor) -> int:
    return other.data_ptr() - one.data_ptr()
