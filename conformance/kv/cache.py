# SPDX-License-Identifier: Apache-2.0
"""KV cache groups: layers that share a block table. A model with several has several kinds of layers, and one pool of blocks for all.

A block belongs to one group at a time; the layers of different groups lie on the same bytes, as vLLM allocates them. Layers of kind

    full      attend to everything before them
    sliding   attend to the last `window` tokens; blocks that leave the window are freed, and null (block 0) in the table from then on
    wide      as sliding, with half the heads and twice the tokens per block: pages of all groups have one size
    latent    as full; a token has one vector, no K and V, and there is one head (MLA)
    state     recurrent (Mamba): a block holds one state, after the last token computed of those that the block is for
    private   full, but no part of the KV that is transferred (enable_kv_transfer=False): the engine makes it anew after a load


The paged KV cache that a connector reads and writes, with a shadow copy that only the engine writes.

The paged KV cache of a rank that holds every n-th token of a block: decode context parallelism.

A block of the scheduler then spans n times the tokens of a block in a rank's memory: position p is on rank p % n. Slots are the
scheduler's, as everywhere in the harness; this class alone knows where in its rank's memory they are, if they are there at all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvconform.contract.case import GroupKind
from kvconform.kernels.codes import CodeBook
from kvconform.kv import device

WINDOWED = ("sliding", "wide")


@dataclass(frozen=True)
class Group:
    """One group: the numbers of its layers, tokens per block, KV heads, window in tokens (None: unlimited), is it transferred?"""

    kind: GroupKind
    layers: tuple[int, ...]
    block_size: int
    heads: int
    window: int | None = None
    transfer: bool = True

    @property
    def recurrent(self) -> bool:
        """Whether a block holds a state, and not what its tokens left each."""
        return self.kind == "state"

    def first_read(self, start: int) -> int:
        """The first position that a token at `start` attends to."""
        return 0 if self.window is None else max(0, start - self.window + 1)


def groups_of(
    kinds: Sequence[GroupKind], *, layers: int, block_size: int, heads: int, window: int
) -> tuple[Group, ...]:
    """The groups of a model with `layers` layers: one per kind, one layer each; a single kind (none: full) is of all layers. ValueError
    if there are not as many layers as kinds."""
    if len(kinds) <= 1:
        kind: GroupKind = kinds[0] if kinds else "full"
        return (Group(kind, tuple(range(layers)), block_size, 1 if kind == "latent" else heads),)
    if len(kinds) != layers:
        raise ValueError(f"{len(kinds)} groups of one layer each in a model of {layers} layers")
    return tuple(
        Group(
            kind,
            (number,),
            block_size * (2 if kind == "wide" else 1),
            1 if kind == "state" else heads // 2 if kind == "wide" else heads,
            window
            if kind in WINDOWED
            else 2
            if kind == "state"
            else None,  # the state before is all that a token needs
            kind != "private",
        )
        for number, kind in enumerate(kinds)
    )


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
"""Of the C library: every hook asks whether the cache was touched, and torch.equal takes five times as long to say no."""
OLDER = {  # until 0.25: shape of a layer's tensor, and the order of its axes as [block, head, slot, K or V, element]
    "kv-second": (lambda b, h, s, d: (b, 2, s, h, d), (0, 3, 2, 1, 4)),
    "kv-first": (lambda b, h, s, d: (2, b, s, h, d), (1, 3, 2, 0, 4)),
}
LARGEST = 15
"""The largest value of a code."""
PACKED = "LBHNC"
"""Since 0.26 a layer is always [blocks, heads, block_size, 2 * head_dim]; the name of a layout says in which order memory has the axes:
L(ayer), B(lock), H(ead), N (slot in the block), C(ontent)."""


class PagedCache:
    """Per layer one tensor, in `layout`. The layers of different `groups` lie on the same bytes; `group_of` says whose a block is now.

    A *slot* is `block * stride + offset`, where stride is the largest block size of all groups. Engine writes go to the tensor and to the
    shadow; whatever differs between the two was written by the connector.
    """

    def __init__(
        self,
        book: CodeBook,
        num_blocks: int,
        block_size: int,
        layout: str = PACKED,
        groups: Sequence[Group] = (),
    ) -> None:
        self.book, self.num_blocks, self.block_size, self.layout = (
            book,
            num_blocks,
            block_size,
            layout,
        )
        self.groups = tuple(groups) or (
            Group("full", tuple(range(book.layers)), block_size, book.heads),
        )
        self.stride = max(group.block_size for group in self.groups)
        self.names = [f"model.layers.{i}.self_attn.attn" for i in range(book.layers)]
        self.group_of: np.ndarray = np.zeros(num_blocks, dtype=np.int64)
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * book.layers
        self._views, self.shadow = list(self.tensors), list(self.tensors)
        self._number = {
            layer: number for number, group in enumerate(self.groups) for layer in group.layers
        }
        # One allocation for all layers, as vLLM makes it: a layer's tensor is a view with an offset into shared storage.
        depth = max(len(group.layers) for group in self.groups)
        page = max(group.heads * group.block_size for group in self.groups) * book.width
        pages = device.current.allocate(depth * num_blocks * page)
        copy = torch.zeros_like(pages)
        self._all, self._all_shadow = (
            pages.view(torch.int32),
            copy.view(torch.int32),
        )  # as bits: NaN must equal itself
        for group in self.groups:
            for layer, tensor, view in zip(
                group.layers, *self._layers(pages, depth, group, layout), strict=False
            ):
                self.tensors[layer], self._views[layer] = tensor, view
            for layer, view in zip(
                group.layers, self._layers(copy, depth, group, layout)[1], strict=False
            ):
                self.shadow[layer] = view
        self._split: tuple[np.ndarray | None, tuple[Any, Any]] = None, (None, None)
        self._upload = device.current.upload
        self._host_mask = book.content_mask()
        self._mask = self._upload(torch.from_numpy(self._host_mask))
        self._plain = not device.current.streamed and not pages.is_cuda
        self._look()

    def _look(self) -> None:
        """Where the bytes are now: a connector may move them, too (`share_memory_`). In host memory that nobody looks at later, arrays are
        read and written: four times as fast, for a few slots, as tensors are."""
        self._arrays = [view.numpy() for view in self._views] if self._plain else []
        self._shadow_arrays = [view.numpy() for view in self.shadow] if self._plain else []
        self._same_bytes = (
            (self._all.data_ptr(), self._all_shadow.data_ptr(), self._all.nbytes)
            if self._plain
            else None
        )

    def _follow(self) -> None:
        """Look again if somebody has moved the bytes."""
        if self._same_bytes is not None and self._same_bytes[0] != self._all.data_ptr():
            self._look()

    def _layers(
        self, pages: torch.Tensor, depth: int, group: Group, layout: str
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(tensors as they are registered, views [blocks, heads, block_size, 2, head_dim]) of the layers on `pages`."""
        heads, size, dim = group.heads, group.block_size, self.book.head_dim
        if layout in OLDER:
            shape_of, axes = OLDER[layout]
            tensors = list(pages.view(depth, *shape_of(self.num_blocks, heads, size, dim)))
            return tensors, [tensor.permute(axes) for tensor in tensors]
        if group.recurrent:  # one row per block; what is left of the page is padding
            states = list(
                pages.view(depth, self.num_blocks, -1)[..., : self.book.width].unflatten(
                    -1, (1, 1, self.book.width)
                )
            )
            return [state.view(torch.int8) for state in states], [
                state.unflatten(-1, (2, dim)) for state in states
            ]
        lengths = dict(
            zip("LBHNC", (depth, self.num_blocks, heads, size, self.book.width), strict=True)
        )
        whole = pages.view([lengths[axis] for axis in layout]).permute(
            [layout.index(axis) for axis in "LBHNC"]
        )
        return list(whole), [tensor.unflatten(-1, (2, dim)) for tensor in whole]

    share: tuple[int, int] = (0, 1)
    """(n, of): it holds every `of`-th token of a block, from the n-th on."""

    @property
    def registered(self) -> tuple[Group, ...]:
        """The groups with the block sizes that the tensors have."""
        return self.groups

    def mapping(self, slots: np.ndarray, group: Group) -> np.ndarray:
        """Slots [n] as the model runner counts them: by the block size of the group; -1 for those that are not in this cache."""
        return slots // self.stride * group.block_size + slots % self.stride

    def group(self, layer: int) -> int:
        """Number of a layer's group."""
        return self._number[layer]

    def split(self, slots: np.ndarray) -> tuple[Any, Any]:
        """Slots [n] to (block ids, offsets), where the cache is: arrays or tensors. The array is not looked at again while the same one is
        asked about."""
        if self._split[0] is not slots:
            index: Any = np.ascontiguousarray(slots, dtype=np.int64)
            if not self._plain:
                index = self._upload(torch.from_numpy(index))
            self._split = slots, (index // self.stride, index % self.stride)
        return self._split[1]

    tolerance: float = 0.0
    """How far a lossy connector may be off, of the largest value; below 1/30, or codes could not be told apart."""

    def write(self, layer: int, slots: np.ndarray, rows: np.ndarray) -> None:
        """Engine write of rows [n, heads, width] to slots [n] of one layer; heads that its group does not have are left out."""
        blocks, offsets = self.split(slots)
        heads = self.groups[self._number[layer]].heads
        if self._plain:
            self._follow()
            parts = rows[:, :heads].reshape(-1, heads, 2, self.book.head_dim)
            self._arrays[layer][blocks, :, offsets] = parts
            self._shadow_arrays[layer][blocks, :, offsets] = parts
            return
        values = (
            self._upload(torch.from_numpy(rows[:, :heads]))
            .to(torch.float32)
            .view(-1, heads, 2, self.book.head_dim)
        )
        self._views[layer][blocks, :, offsets] = values
        self.shadow[layer][blocks, :, offsets] = values

    def peek(self, layer: int, slots: np.ndarray) -> torch.Tensor:
        """The bytes of slots [n] of one layer, as a copy [n, heads, 2, head_dim] where the cache is."""
        blocks, offsets = self.split(slots)
        return self._views[layer][blocks, :, offsets]

    def poke(self, layer: int, slots: np.ndarray, values: torch.Tensor) -> None:
        """Put such bytes there; not into the shadow."""
        blocks, offsets = self.split(slots)
        self._views[layer][blocks, :, offsets] = values

    def read(self, layer: int, slots: np.ndarray) -> torch.Tensor:
        """Rows [n, heads, width] of slots [n] as they are now, on the host; what is within the tolerance of a code is that code."""
        return self._rows(layer, slots).cpu()

    def _rows(self, layer: int, slots: np.ndarray) -> torch.Tensor:
        blocks, offsets = self.split(slots)
        rows = self._views[layer][blocks, :, offsets].flatten(2)
        return (
            rows
            if not self.tolerance
            else torch.where(
                (rows - rows.round()).abs() <= self.tolerance * LARGEST, rows.round(), rows
            )
        )

    def mismatches(self, layer: int, slots: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Indices into `slots` whose content differs from `rows` (the nonce lanes are not compared)."""
        return np.flatnonzero(self.differing(layer, slots, rows).cpu().numpy())

    def differing(self, layer: int, slots: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """Which of `slots` [n] differ in content from `rows`: a mask [n], where the cache is. The host waits for nothing."""
        if self._plain and not self.tolerance:
            blocks, offsets = self.split(slots)
            self._follow()
            array = self._arrays[layer]
            there = array[blocks, :, offsets].reshape(len(slots), array.shape[1], self.book.width)
            return torch.from_numpy(
                ((there != rows[:, : there.shape[1]]) & self._host_mask).any((1, 2))
            )
        have = self._rows(layer, slots)
        wanted = self._upload(torch.from_numpy(rows[:, : have.shape[1]]))
        different: torch.Tensor = (
            ((have != wanted) & self._mask).flatten(1).contiguous().view(torch.int64).any(1)
        )  # eight at a time
        return different

    def foreign(self, layer: int) -> np.ndarray:
        """Slots [n] of one layer that somebody other than the engine changed since the last call; takes them into the shadow."""
        return self.changed_slots(self.changes(layer))

    @property
    def untouched(self) -> bool:
        """Whether certainly no layer was changed by anybody else. On CUDA it is never certain: asking would make the host wait."""
        if self._same_bytes is not None:
            self._follow()
            return not _memcmp(*self._same_bytes)
        return not self._all.is_cuda and torch.equal(self._all, self._all_shadow)

    def changes(self, layer: int) -> torch.Tensor | None:
        """`foreign` as a mask [blocks, block_size], where the cache is; None if nothing was changed. On CUDA the host waits for nothing."""
        real, shadow = (
            self._views[layer].view(torch.int32),
            self.shadow[layer].view(torch.int32),
        )  # as bits: NaN must equal itself
        if not real.is_cuda and torch.equal(real, shadow):
            return None
        touched = (real != shadow).flatten(3).any(3).any(1)
        if len(self.groups) > 1:  # bytes of another group's block are another layer's
            touched &= self._upload(torch.from_numpy(self.group_of == self._number[layer]))[:, None]
        shadow.copy_(torch.where(touched[:, None, :, None, None], real, shadow))
        return touched

    def changed_slots(self, touched: torch.Tensor | None) -> np.ndarray:
        """The slots [n] of such a mask."""
        if touched is None:
            return np.empty(0, dtype=np.int64)
        blocks, offsets = np.nonzero(touched.cpu().numpy())
        return blocks * self.stride + offsets


class SlicedCache(PagedCache):
    """The share of rank `rank` of `ranks`. Writes to slots of other ranks are dropped, and they are never found wrong. `block_size` is the
    scheduler's; ValueError if it cannot be split."""

    def __init__(
        self, book: CodeBook, num_blocks: int, block_size: int, rank: int, ranks: int, **kwargs: Any
    ) -> None:
        if block_size % ranks:
            raise ValueError(f"blocks of {block_size} tokens cannot be split over {ranks} ranks")
        self.share = (rank, ranks)
        super().__init__(book, num_blocks, block_size, **kwargs)

    @property
    def registered(self) -> tuple[Group, ...]:
        return tuple(
            replace(group, block_size=group.block_size // self.share[1]) for group in self.groups
        )

    def _layers(
        self, pages: torch.Tensor, depth: int, group: Group, layout: str
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        mine = replace(group, block_size=group.block_size // self.share[1])
        return super()._layers(pages[: pages.numel() // self.share[1]], depth, mine, layout)

    def _mine(self, slots: np.ndarray) -> np.ndarray:
        """Indices of the slots that this rank holds."""
        rank, ranks = self.share
        return np.flatnonzero(slots % self.stride % ranks == rank)

    def split(self, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, offsets = super().split(slots)
        return blocks, offsets // self.share[1]

    def mapping(self, slots: np.ndarray, group: Group) -> np.ndarray:
        rank, ranks = self.share
        here = slots // self.stride * (group.block_size // ranks) + slots % self.stride // ranks
        return np.where(slots % self.stride % ranks == rank, here, -1)

    def write(self, layer: int, slots: np.ndarray, rows: np.ndarray) -> None:
        mine = self._mine(slots)
        super().write(layer, slots[mine], rows[mine])

    def peek(self, layer: int, slots: np.ndarray) -> torch.Tensor:
        return super().peek(layer, slots[self._mine(slots)])

    def poke(self, layer: int, slots: np.ndarray, values: torch.Tensor) -> None:
        super().poke(layer, slots[self._mine(slots)], values)

    def differing(self, layer: int, slots: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        mine = self._mine(slots)
        found = super().differing(layer, slots[mine], rows[mine])
        return torch.zeros(len(slots), dtype=torch.bool, device=found.device).index_copy_(
            0, self._upload(torch.from_numpy(mine)), found
        )

    def changed_slots(self, touched: torch.Tensor | None) -> np.ndarray:
        (rank, ranks), slots = self.share, super().changed_slots(touched)
        return slots // self.stride * self.stride + slots % self.stride * ranks + rank
