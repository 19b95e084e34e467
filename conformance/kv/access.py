# SPDX-License-Identifier: Apache-2.0
"""Access to the bytes of a paged cache: by numpy, by torch, or by the kernels of kernels/.

All three write the same bytes and find the same differences. Which one a cache has depends on its
memory (`access`): arrays for plain host memory, kernels for a CUDA device, else tensors. With
kernels, the device encodes, compares and digests; the host gets one number per slot.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvconform.kernels.codes import CodeBook
from kvconform.kernels.digest import digest
from kvconform.kernels.layout import LOGICAL, Layout
from kvconform.kernels.paged import Paged
from kvconform.kernels.poison import poison
from kvconform.kernels.verify import verify
from kvconform.kernels.write import write
from kvconform.kv import device
from kvconform.kv.content import Content, Index

_memcmp = ctypes.CDLL(None).memcmp
"""The C library's. Every hook checks for changes, and torch.equal takes five times as long."""
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
LARGEST = 15
"""The largest value of a code."""
VIEW = Layout("view", LOGICAL, LOGICAL)
"""The layout of `Pages.views`, whose strides are arbitrary."""
KEPT = 4
"""Uploads that are kept: those of two groups' reads and writes."""


@dataclass
class Pages:
    """The bytes of a cache.

    `views` and `shadow`: its layers, and what the engine has written to them, as [blocks, heads,
    block size, 2, head_dim]. `whole` and `whole_shadow`: all bytes of both, as integers. `layers`:
    those of each group. `owners`: number of the group [blocks] that each block belongs to.
    """

    book: CodeBook
    dtype: torch.dtype
    views: list[torch.Tensor]
    shadow: list[torch.Tensor]
    whole: torch.Tensor
    whole_shadow: torch.Tensor
    layers: tuple[tuple[int, ...], ...]
    owners: np.ndarray


class Tensors:
    """Access by torch, in memory of any kind. The host waits for nothing."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.upload = device.current.upload
        self._mask = self.upload(torch.from_numpy(pages.book.content_mask()))
        self._uploaded: list[tuple[tuple[Any, ...], torch.Tensor]] = []

    def on_device(self, make: Callable[[], np.ndarray], *known_by: Any) -> torch.Tensor:
        """Return an array on the cache's device; `make` makes it, unless it was kept.

        It is `known_by` the identity of these objects, which must not be changed.
        """
        for objects, tensor in self._uploaded:
            if len(objects) == len(known_by) and all(map(_same, objects, known_by)):
                return tensor
        tensor = self.upload(torch.from_numpy(make()))
        self._uploaded = [*self._uploaded[1 - KEPT :], (known_by, tensor)]
        return tensor

    def _at(self, blocks: np.ndarray, offsets: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return self.on_device(lambda: blocks, blocks), self.on_device(lambda: offsets, offsets)

    def write(
        self,
        layer: int,
        blocks: np.ndarray,
        offsets: np.ndarray,
        content: Content,
        which: Index,
    ) -> None:
        """Write a part of `content` to slots of one layer, as the engine."""
        self.write_rows(layer, blocks, offsets, content.rows[which, layer])

    def write_rows(
        self, layer: int, blocks: np.ndarray, offsets: np.ndarray, rows: np.ndarray
    ) -> None:
        """Write rows [n, heads, width] to slots of one layer, as the engine."""
        values = self._values(layer, rows)
        block, offset = self._at(blocks, offsets)
        for target in (self.pages.views[layer], self.pages.shadow[layer]):
            target[block, :, offset] = values

    def _values(self, layer: int, rows: np.ndarray) -> torch.Tensor:
        """Return rows [n, heads, width] as elements [n, heads, 2, head_dim], of a layer's heads."""
        heads = self.pages.views[layer].shape[1]
        values = self.upload(torch.from_numpy(rows[:, :heads])).to(self.pages.dtype)
        return values.view(len(rows), heads, 2, self.pages.book.head_dim)

    def poison(self, group: int, blocks: np.ndarray, content: Content, which: np.ndarray) -> None:
        """Fill all slots of blocks [n] of the views, in the group's layers, with one row each."""
        block = self.upload(torch.from_numpy(blocks))
        for layer in self.pages.layers[group]:
            values = self._values(layer, content.rows[which, layer])[:, :, None]
            for target in (self.pages.views[layer], self.pages.shadow[layer]):
                target[block] = values

    def peek(self, layer: int, blocks: np.ndarray, offsets: np.ndarray) -> torch.Tensor:
        """Return a copy [n, heads, 2, head_dim] of slots of a layer, on the cache's device."""
        block, offset = self._at(blocks, offsets)
        return self.pages.views[layer][block, :, offset]

    def poke(
        self, layer: int, blocks: np.ndarray, offsets: np.ndarray, values: torch.Tensor
    ) -> None:
        """Write what `peek` returned back, but not to the shadow."""
        block, offset = self._at(blocks, offsets)
        self.pages.views[layer][block, :, offset] = values

    def copy(
        self,
        layer: int,
        source: tuple[np.ndarray, np.ndarray],
        target: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Copy slots of a layer, (blocks, offsets), to others, as the engine."""
        values = self.peek(layer, *source)
        block, offset = self._at(*target)
        for tensors in (self.pages.views, self.pages.shadow):
            tensors[layer][block, :, offset] = values

    def rows(
        self, layer: int, blocks: np.ndarray, offsets: np.ndarray, tolerance: float
    ) -> torch.Tensor:
        """Return the rows [n, heads, width] of slots, on the cache's device.

        A value within the tolerance of a code's becomes the code's.
        """
        rows = self.peek(layer, blocks, offsets).flatten(2).to(torch.float32)
        if not tolerance:
            return rows
        near_a_code = (rows - rows.round()).abs() <= tolerance * LARGEST
        return torch.where(near_a_code, rows.round(), rows)

    def differing(
        self,
        layer: int,
        blocks: np.ndarray,
        offsets: np.ndarray,
        content: Content,
        which: Index,
        tolerance: float,
    ) -> torch.Tensor:
        """Return a mask [n] of slots that do not hold a part of `content`; the nonce is ignored."""
        if tolerance:
            return self._beyond(tolerance, layer, blocks, offsets, content, which)
        return self._differing(layer, blocks, offsets, content, which)

    def _differing(
        self, layer: int, blocks: np.ndarray, offsets: np.ndarray, content: Content, which: Index
    ) -> torch.Tensor:
        """Return the mask of `differing`, without a tolerance."""
        return self._beyond(0.0, layer, blocks, offsets, content, which)

    def _beyond(
        self,
        tolerance: float,
        layer: int,
        blocks: np.ndarray,
        offsets: np.ndarray,
        content: Content,
        which: Index,
    ) -> torch.Tensor:
        """Return the mask of `differing`, by torch."""
        have = self.rows(layer, blocks, offsets, tolerance)
        wanted = self.upload(torch.from_numpy(content.rows[which, layer][:, : have.shape[1]]))
        lanes = ((have != wanted) & self._mask).flatten(1)
        different: torch.Tensor = lanes.contiguous().view(torch.int64).any(1)  # eight at a time
        return different

    @property
    def untouched(self) -> bool:
        """Whether it is certain that only the engine changed any layer.

        On CUDA it is never certain: to find out would make the host wait.
        """
        pages = self.pages
        return not pages.whole.is_cuda and torch.equal(pages.whole, pages.whole_shadow)

    def changes(self) -> list[torch.Tensor | None]:
        """Return masks [blocks, block size] of changes by others than the engine, by layer.

        The blocks are those of the views. None for a layer that certainly has no change. Copies the
        changes to the shadow, so that each is returned once.
        """
        found: list[torch.Tensor | None] = [None] * len(self.pages.views)
        for group, layers in enumerate(self.pages.layers):
            for layer, touched in zip(layers, self._touched(group), strict=True):
                if touched is not None:
                    self._adopt(layer, touched)
                    found[layer] = touched
        self._adopt_padding()
        return found

    def _adopt_padding(self) -> None:
        """Copy to the shadow what a state leaves unused in its block.

        A connector may write it, and the block may belong to another group later.
        """
        count = len(self.pages.owners)
        for group, layers in enumerate(self.pages.layers):
            used = self.pages.views[layers[0]][0].numel()
            own = self._own(group) if used < self.pages.whole.numel() // count else None
            if own is None:
                continue
            real = self.pages.whole.view(count, -1)[:, used:]
            shadow = self.pages.whole_shadow.view(count, -1)[:, used:]
            shadow.copy_(torch.where(own[:, None], real, shadow))

    def _touched(self, group: int) -> Iterable[torch.Tensor | None]:
        """Yield what `changes` returns, of each layer of a group.

        A layer is compared when it is asked for, and `changes` adopts it before the next one.
        """
        for layer in self.pages.layers[group]:
            real, shadow = self._bits(layer)
            if not real.is_cuda and torch.equal(real, shadow):
                yield None
                continue
            touched = (real != shadow).flatten(3).any(3).any(1)
            own = self._own(group)
            yield touched if own is None else touched & own[:, None]

    def _bits(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer and its shadow as bits, so that NaN equals itself."""
        whole = self.pages.whole.dtype
        return self.pages.views[layer].view(whole), self.pages.shadow[layer].view(whole)

    def _adopt(self, layer: int, touched: torch.Tensor) -> None:
        """Copy slots of a layer to the shadow, those of a mask [blocks, block size].

        No others: a thread or a stream of the connector's may write them at this moment.
        """
        real, shadow = self._bits(layer)
        torch.where(touched[:, None, :, None, None], real, shadow, out=shadow)

    def _own(self, group: int) -> torch.Tensor | None:
        """Return a mask [blocks] of the group's blocks; None if there is one group.

        The bytes of another group's block are another layer's.
        """
        if len(self.pages.layers) == 1:
            return None
        return self.upload(torch.from_numpy(self.pages.owners == group))


class Arrays(Tensors):
    """Access by numpy, in plain host memory: for a few slots, that is four times as fast."""

    def __init__(self, pages: Pages) -> None:
        super().__init__(pages)
        self._host_mask = pages.book.content_mask()
        self._width = pages.book.width
        self._look()

    def _look(self) -> None:
        """Note where the bytes are now: a connector, too, may move them (`share_memory_`)."""
        pages = self.pages
        self._arrays = [view.numpy() for view in pages.views]
        self._shadow = [view.numpy() for view in pages.shadow]
        self._bytes = pages.whole.data_ptr(), pages.whole_shadow.data_ptr(), pages.whole.nbytes

    def _follow(self) -> None:
        """Look again if the bytes were moved."""
        if self._bytes[0] != self.pages.whole.data_ptr():
            self._look()

    def write_rows(
        self, layer: int, blocks: np.ndarray, offsets: np.ndarray, rows: np.ndarray
    ) -> None:
        """See Tensors."""
        self._follow()
        heads = self._arrays[layer].shape[1]
        values = rows[:, :heads].reshape(len(rows), heads, 2, self.pages.book.head_dim)
        self._arrays[layer][blocks, :, offsets] = values
        self._shadow[layer][blocks, :, offsets] = values

    def poison(self, group: int, blocks: np.ndarray, content: Content, which: np.ndarray) -> None:
        """See Tensors."""
        self._follow()
        for layer in self.pages.layers[group]:
            heads = self._arrays[layer].shape[1]
            rows = content.rows[which, layer]
            values = rows[:, :heads].reshape(len(rows), heads, 1, 2, self.pages.book.head_dim)
            self._arrays[layer][blocks] = values
            self._shadow[layer][blocks] = values

    def _differing(
        self, layer: int, blocks: np.ndarray, offsets: np.ndarray, content: Content, which: Index
    ) -> torch.Tensor:
        """See Tensors."""
        self._follow()
        array = self._arrays[layer]
        there = array[blocks, :, offsets].reshape(len(blocks), array.shape[1], self._width)
        wrong = (there != content.rows[which, layer][:, : there.shape[1]]) & self._host_mask
        return torch.from_numpy(wrong.any((1, 2)))

    @property
    def untouched(self) -> bool:
        """See Tensors."""
        self._follow()
        return not _memcmp(*self._bytes)


class Kernels(Tensors):
    """Access by the kernels of kernels/, on the stream that is current.

    Content goes to the device as ids. What the connector has changed is found by digests of single
    slots: each place in a block counts as a layer of blocks of one slot, so that one launch digests
    a whole group. `backend`: see kernels.device.choose. Values within a tolerance are compared by
    torch.
    """

    def __init__(self, pages: Pages, backend: str | None = None) -> None:
        super().__init__(pages)
        self.backend = backend
        self._layers = [
            self._paged([layer], lambda view: [view]) for layer in range(len(pages.views))
        ]
        alike = [self._alike(layers) for layers in pages.layers]
        self._groups = [
            [self._paged(layers, lambda view: [view]) for layers in parts] for parts in alike
        ]
        self._slots = [[self._paged(layers, _by_place) for layers in parts] for parts in alike]
        self._blocks = [
            torch.arange(parts[0][0].blocks, device=parts[0][0].device) for parts in self._groups
        ]

    def _alike(self, layers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return neighbouring layers that have as many heads as each other."""
        by_heads = itertools.groupby(layers, lambda layer: self.pages.views[layer].shape[1])
        return [tuple(some) for _, some in by_heads]

    def _paged(
        self,
        layers: tuple[int, ...] | list[int],
        split: Callable[[torch.Tensor], list[torch.Tensor]],
    ) -> tuple[Paged, Paged]:
        """Return these layers, each split into tensors, and their shadow for the kernels."""
        book = self.pages.book

        def made(views: list[torch.Tensor]) -> Paged:
            tensors = [part for layer in layers for part in split(views[layer])]
            numbers = [book.layer + layer for layer in layers for _ in split(views[layer])]
            return Paged(tensors, VIEW, numbers, book.head)

        return made(self.pages.views), made(self.pages.shadow)

    def _slots_of(self, layer: int, blocks: np.ndarray, offsets: np.ndarray) -> torch.Tensor:
        size = self._layers[layer][0].size
        return self.on_device(lambda: blocks * size + offsets, blocks, offsets, size)

    def _ids_of(self, content: Content, which: Index) -> torch.Tensor:
        return self.on_device(
            lambda: np.ascontiguousarray(content.ids[which]).view(np.int64), content, which
        )

    def write(
        self,
        layer: int,
        blocks: np.ndarray,
        offsets: np.ndarray,
        content: Content,
        which: Index,
    ) -> None:
        """See Tensors."""
        slots, ids = self._slots_of(layer, blocks, offsets), self._ids_of(content, which)
        for paged in self._layers[layer]:
            write(paged, slots, ids, content.nonce, self.backend)

    def poison(self, group: int, blocks: np.ndarray, content: Content, which: np.ndarray) -> None:
        """See Tensors."""
        there, ids = self.upload(torch.from_numpy(blocks)), self._ids_of(content, which)
        for paged in itertools.chain(*self._groups[group]):
            poison(paged, there, ids, content.nonce, self.backend)

    def _differing(
        self, layer: int, blocks: np.ndarray, offsets: np.ndarray, content: Content, which: Index
    ) -> torch.Tensor:
        """See Tensors."""
        slots, ids = self._slots_of(layer, blocks, offsets), self._ids_of(content, which)
        return verify(self._layers[layer][0], slots, ids, self.backend).wrong != 0

    @property
    def untouched(self) -> bool:
        """See Tensors: it is never certain."""
        return False

    def _touched(self, group: int) -> Iterable[torch.Tensor | None]:
        """See Tensors; all layers are compared at once."""
        found = []
        for parts in self._slots[group]:
            now, then = (digest(paged, self._blocks[group], self.backend) for paged in parts)
            found.append((now != then).any(2))
        touched = torch.cat(found, 1).unflatten(1, (len(self.pages.layers[group]), -1))
        own = self._own(group)
        if own is not None:
            touched &= own[:, None, None]
        return touched.unbind(1)


def access(pages: Pages) -> Tensors:
    """Return the access to the bytes of a cache on the current device."""
    if device.current.kernels:
        return Kernels(pages)
    plain = not device.current.streamed and not pages.whole.is_cuda
    # numpy has no bfloat16.
    return Arrays(pages) if plain and pages.dtype == torch.float32 else Tensors(pages)


def _by_place(view: torch.Tensor) -> list[torch.Tensor]:
    """Return a layer's slots by their place in a block, as layers of blocks of one slot."""
    return [view[:, :, place : place + 1] for place in range(view.shape[2])]


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, int) and one == other)
