# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache that a connector reads and writes, with a shadow of what is known.

A KV cache group is a set of layers that share a block table. A model with several groups has
several kinds of layers, and one pool of blocks for all. A block belongs to one group at a time; the
layers of different groups are on the same bytes, as vLLM allocates them. Layers of kind

    full      attend to everything before them
    broad     are as full, with half the heads and twice the tokens per block, so that the pages of
              all groups have one size
    sliding   attend to the last `window` tokens; blocks that leave the window are freed, and their
              entries in the table are null (block 0) from then on
    wide      are as sliding, with the heads and blocks of broad
    local     attend to the chunk of `window` tokens that they are in; blocks of earlier chunks are
              freed as those that leave a window
    latent    are as full, but a token has one vector, no K and V, and there is one head (MLA)
    state     are recurrent (Mamba): a block holds one state, the one after the last computed token
              of those that the block is for; behind them are blocks for the states after drafts
    private   are as full, but no part of the KV that is transferred (enable_kv_transfer=False): the
              engine regenerates it after a load
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from kvconform.contract.case import LARGE, GroupKind
from kvconform.kernels.codes import CodeBook
from kvconform.kv import device
from kvconform.kv.access import Pages, access
from kvconform.kv.content import ALL, Content, Index, part_of


class Slice(NamedTuple):
    """The tokens of every block that a rank holds: `run` in a row, of `ranks` such runs one.

    vLLM calls the run cp_kv_cache_interleave_size (v1/worker/block_table.py:
    ComputeSlotMappingKernel). All offsets and positions are the scheduler's except where noted.
    """

    rank: int = 0
    ranks: int = 1
    run: int = 1

    def has(self, offsets: np.ndarray) -> np.ndarray:
        """Return for which offsets [n] in a block, or positions, the rank holds the token."""
        return offsets // self.run % self.ranks == self.rank

    def inside(self, offsets: np.ndarray) -> np.ndarray:
        """Return the offsets [n] in the rank's own block."""
        return offsets // (self.run * self.ranks) * self.run + offsets % self.run

    def outside(self, own: np.ndarray) -> np.ndarray:
        """Return the offsets [n] of the rank's own offsets."""
        return (own // self.run * self.ranks + self.rank) * self.run + own % self.run


WHOLE = Slice()
"""All tokens."""


@dataclass(frozen=True)
class Group:
    """One KV cache group.

    `layers`: their numbers. `block_size`: tokens per block. `heads`: KV heads. `window`: in tokens,
    of local attention the length of a chunk; None: unlimited. `transfer`: whether its KV is
    transferred. `narrow`: numbers of layers with half of the heads.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    block_size: int
    heads: int
    window: int | None = None
    transfer: bool = True
    narrow: frozenset[int] = frozenset()

    def heads_of(self, layer: int) -> int:
        """Return the KV heads of one layer."""
        return self.heads // 2 if layer in self.narrow else self.heads

    @property
    def recurrent(self) -> bool:
        """Whether a block holds one state, and not KV of each token."""
        return self.kind == "state"

    @property
    def rotary(self) -> bool:
        """Whether the first half of a row is keys that depend on their positions."""
        return self.kind not in ("latent", "state")

    def reach(self, start: int) -> int | None:
        """Return how many tokens one at `start` attends to, itself included; None: unlimited."""
        if self.kind == "local" and self.window is not None:
            return start % self.window + 1
        return self.window

    def first_read(self, start: int) -> int:
        """Return the first position that a token at `start` attends to."""
        reach = self.reach(start)
        return 0 if reach is None else max(0, start - reach + 1)


def groups_of(
    kinds: Sequence[GroupKind],
    *,
    layers: int,
    block_size: int,
    heads: int,
    window: int,
    narrow: Literal["first", "last"] | None = None,
) -> tuple[Group, ...]:
    """Return the groups of a model with `layers` layers: one per kind, of one layer each.

    A single kind (none: full) is of all layers, of which one may be `narrow`. ValueError if several
    kinds are not as many as the layers.
    """
    if len(kinds) <= 1:
        kind: GroupKind = kinds[0] if kinds else "full"
        whole = _group_of_layer(kind, 0, block_size, 1 if kind == "latent" else heads, window)
        half = {"first": [0], "last": [layers - 1]}.get(narrow or "", [])
        return (replace(whole, layers=tuple(range(layers)), narrow=frozenset(half)),)
    if len(kinds) != layers:
        raise ValueError(f"{len(kinds)} groups of one layer each in a model of {layers} layers")
    return tuple(
        _group_of_layer(kind, number, block_size, heads, window)
        for number, kind in enumerate(kinds)
    )


def _group_of_layer(kind: GroupKind, layer: int, block_size: int, heads: int, window: int) -> Group:
    if kind == "state":  # the state before it is all that a token needs
        return Group(kind, (layer,), block_size, heads=1, window=2)
    if kind in LARGE:
        reach = window if kind == "wide" else None
        return Group(kind, (layer,), 2 * block_size, heads // 2, reach)
    if kind in ("sliding", "local"):
        return Group(kind, (layer,), block_size, heads, window)
    return Group(kind, (layer,), block_size, heads, transfer=kind != "private")


OLDER = {
    "kv-second": (lambda b, h, s, d: (b, 2, s, h, d), (0, 3, 2, 1, 4)),
    "kv-first": (lambda b, h, s, d: (2, b, s, h, d), (1, 3, 2, 0, 4)),
}
"""Layouts until vLLM 0.25, by name.

Each has the shape of a layer's tensor, and the order of its axes as [block, head, slot, K or V,
element].
"""
PACKED = "LBHNC"
"""The default layout, one of those since vLLM 0.26.

A layer is always [blocks, heads, block_size, 2 * head_dim]. The name of a layout gives the order of
the axes in memory: L(ayer), B(lock), H(ead), N (slot in the block), C(ontent).
"""
SPLITTABLE = ("LBHNC", "LBNHC")
"""Layouts in which vLLM splits a block into kernel blocks: the pages of a layer are dense in them.

With blocks outermost, it registers whole blocks; with heads outside of blocks, it does not start.
"""


UNLIKE = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""Layouts in which layers may have unlike numbers of heads: a layer has each block in one piece."""


class PagedCache:
    """A paged KV cache: one tensor per layer, in `layout`.

    The layers of different `groups` are on the same bytes. `group_of` maps a block to the group
    that it belongs to now. A *slot* is `block * stride + offset`, where stride is the largest block
    size of all groups. The engine writes to the tensor and to the shadow; every difference between
    the two was written by the connector.

    With a `kernel_block_size` the attention works on smaller blocks than the scheduler's, and the
    tensors have those: block b is the kernel blocks [b * kernel_blocks, (b + 1) * kernel_blocks).

    `names` are those of the layers. `drafter` is the index of the drafter's layer, if it has KV.
    `drafts` is the number of drafts in a step, and of blocks of states that a request has for them.
    `hash_size` is the number of tokens per block hash. `retention_interval` says which states and
    windows stay in the prefix cache (vLLM's prefix_cache_retention_interval).
    """

    def __init__(
        self,
        book: CodeBook,
        num_blocks: int,
        block_size: int,
        layout: str = PACKED,
        groups: Sequence[Group] = (),
        kernel_block_size: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.book = book
        self.dtype = dtype
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layout = layout
        whole = Group("full", tuple(range(book.layers)), block_size, book.heads)
        self.groups = tuple(groups) or (whole,)
        self.kernel_block_size = kernel_block_size if layout in SPLITTABLE else None
        self.kernel_blocks = self._kernel_blocks()
        self.drafter: int | None = None
        self.drafts = 0
        self.hash_size = block_size
        self.retention_interval: int | None = 0
        self.stride = max(group.block_size for group in self.groups)
        self.names = [f"model.layers.{i}.self_attn.attn" for i in range(book.layers)]
        self.group_of: np.ndarray = np.zeros(num_blocks, dtype=np.int64)
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * book.layers
        self._number = {
            layer: number for number, group in enumerate(self.groups) for layer in group.layers
        }
        # One allocation for all layers, as in vLLM: a layer's tensor is a view with an offset into
        # shared storage.
        depth = max(len(group.layers) for group in self.groups)
        rows = max(  # of a block, in all layers of its group
            sum(map(group.heads_of, group.layers)) * group.block_size for group in self.groups
        )
        pages = device.current.allocate(num_blocks * rows * book.width, dtype)
        copy = torch.zeros_like(pages)
        views, shadow = list(self.tensors), list(self.tensors)
        for group in self.groups:
            tensors, mine = self._layers(pages, depth, group, layout)
            copies = self._layers(copy, depth, group, layout)[1]
            for number, layer in enumerate(group.layers):
                self.tensors[layer] = tensors[number]
                views[layer] = mine[number]
                shadow[layer] = copies[number]
        self._split: tuple[np.ndarray | None, Any] = None, None
        bits = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[dtype.itemsize]
        self._access = access(
            Pages(
                book,
                dtype,
                views,
                shadow,
                pages.view(bits),
                copy.view(bits),
                tuple(group.layers for group in self.groups),
                self.group_of,
            )
        )

    def _kernel_blocks(self) -> int:
        """Return the number of kernel blocks per block; ValueError if a block cannot be split."""
        if self.kernel_block_size is None:
            return 1
        if len(self.groups) > 1:
            raise ValueError("kernel blocks need a cache of one group")
        [group] = self.registered
        if group.recurrent or group.block_size % self.kernel_block_size:
            raise ValueError(
                f"blocks of {group.block_size} tokens cannot be split"
                f" into kernel blocks of {self.kernel_block_size}"
            )
        return group.block_size // self.kernel_block_size

    def _layers(
        self, pages: torch.Tensor, depth: int, group: Group, layout: str
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors of the layers on `pages`, and views of them.

        The tensors are as they are registered; the views are [blocks, heads, block_size, 2,
        head_dim].
        """
        heads, size, dim = group.heads, group.block_size, self.book.head_dim
        if layout in OLDER:
            shape_of, axes = OLDER[layout]
            tensors = list(pages.view(depth, *shape_of(self.num_blocks, heads, size, dim)))
            return tensors, [tensor.permute(axes) for tensor in tensors]
        if group.recurrent:  # one row per block; the rest of the page is padding
            rows = pages.view(depth, self.num_blocks, -1)[..., : self.book.width]
            states = list(rows.unflatten(-1, (1, 1, self.book.width)))
            tensors = [state.view(torch.int8) for state in states]
            return tensors, [state.unflatten(-1, (2, dim)) for state in states]
        if group.narrow:
            made = self._unlike_layers(pages, group, layout)
            return made, [tensor.unflatten(-1, (2, dim)) for tensor in made]
        blocks, size = self.num_blocks * self.kernel_blocks, size // self.kernel_blocks
        lengths = dict(zip("LBHNC", (depth, blocks, heads, size, self.book.width), strict=True))
        in_memory = pages.view([lengths[axis] for axis in layout])
        whole = in_memory.permute([layout.index(axis) for axis in "LBHNC"])
        return list(whole), [tensor.unflatten(-1, (2, dim)) for tensor in whole]

    def _unlike_layers(self, pages: torch.Tensor, group: Group, layout: str) -> list[torch.Tensor]:
        """Return the tensors of layers with unlike numbers of heads, one behind the other.

        In a layout with blocks outermost, they are so in each block.
        """
        counts = [group.heads_of(layer) for layer in group.layers]
        page = group.block_size * self.book.width
        inside = [axis for axis in layout if axis not in "LB"]
        order = [inside.index(axis) for axis in "HNC"]
        if layout[0] == "L":
            parts = pages.split([self.num_blocks * count * page for count in counts])
            blocks = [part.view(self.num_blocks, -1) for part in parts]
        else:
            blocks = list(pages.view(self.num_blocks, -1).split([n * page for n in counts], 1))
        found = []
        for part, count in zip(blocks, counts, strict=True):
            lengths = {"H": count, "N": group.block_size, "C": self.book.width}
            in_memory = part.unflatten(1, [lengths[axis] for axis in inside])
            found.append(in_memory.permute(0, *(1 + axis for axis in order)))
        return found

    share: Slice = WHOLE
    """(n, of): the cache holds every `of`-th token of a block, from the n-th on."""

    @property
    def registered(self) -> tuple[Group, ...]:
        """The groups with the block sizes that the tensors have."""
        return self.groups

    def mapping(self, slots: np.ndarray, group: Group) -> np.ndarray:
        """Convert slots [n] to the model runner's, which count by the block size of the group.

        Slots that are not in this cache become -1.
        """
        return slots // self.stride * group.block_size + slots % self.stride

    def group(self, layer: int) -> int:
        """Return the number of a layer's group."""
        return self._number[layer]

    def slot_bytes(self, layer: int) -> int:
        """Return the bytes of one slot of a layer."""
        heads = self.groups[self._number[layer]].heads_of(layer)
        return heads * self.book.width * self.dtype.itemsize

    def split(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Convert slots [n] to (block ids, offsets) of the tensors.

        The result is cached, by identity, until it is called with another array.
        """
        if self._split[0] is not slots:
            index = np.ascontiguousarray(slots, dtype=np.int64)
            self._split = slots, self._place(index // self.stride, index % self.stride)
        found: tuple[np.ndarray, np.ndarray] = self._split[1]
        return found

    def _place(self, blocks: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Convert blocks [n] and offsets [n] in them to those of the tensors."""
        size = self.kernel_block_size
        if size is None:
            return blocks, offsets
        return blocks * self.kernel_blocks + offsets // size, offsets % size

    def kernel_table(self, table: np.ndarray) -> np.ndarray:
        """Convert a block table [reqs, blocks] to the model runner's, which has kernel blocks."""
        if self.kernel_blocks == 1:
            return table
        parts = np.arange(self.kernel_blocks, dtype=table.dtype)
        return (table[..., None] * self.kernel_blocks + parts).reshape(len(table), -1)

    tolerance: float = 0.0
    """Permitted error of a lossy connector, as a part of the largest value.

    It must be below 1/30, or codes cannot be distinguished.
    """

    chunk_tokens: int = 1
    """Tokens that a lossy connector stores together."""

    def write(self, layer: int, slots: np.ndarray, content: Content, which: Index = ALL) -> None:
        """Write a part of `content` to slots [n] of one layer, as the engine.

        Heads that its group does not have are left out.
        """
        self._access.write(layer, *self.split(slots), content, which)

    def copy_block(self, source: int, target: int) -> np.ndarray:
        """Copy a block, as the engine; return its slots [2, n] in the source and in the target.

        The target becomes a block of the source's group.
        """
        number = self.group_of[target] = int(self.group_of[source])
        group = self.groups[number]
        offsets = np.arange(1 if group.recurrent else group.block_size)
        slots = np.stack([block * self.stride + offsets for block in (source, target)])
        for layer in group.layers:
            self._copy(layer, *slots)
        return slots

    def _copy(self, layer: int, source: np.ndarray, target: np.ndarray) -> None:
        """Copy slots [n] of a layer to others, as the engine."""
        self._access.copy(layer, self.split(source), self.split(target))

    def write_rows(self, layer: int, slots: np.ndarray, rows: np.ndarray) -> None:
        """Write rows [n, heads, width] to slots [n] of one layer, as the engine.

        They may be no codes.
        """
        self._access.write_rows(layer, *self.split(slots), rows)

    def poison(
        self, number: int, blocks: np.ndarray, content: Content, which: np.ndarray
    ) -> np.ndarray:
        """Fill blocks [n] of a group with a part of `content`, a row for each; return their slots.

        All slots of a block get the same row.
        """
        group = self.groups[number]
        parts = blocks[:, None] * self.kernel_blocks + np.arange(self.kernel_blocks)
        of_each = np.repeat(which, self.kernel_blocks)
        self._access.poison(number, parts.reshape(-1), content, of_each)
        size = 1 if group.recurrent else group.block_size
        slots: np.ndarray = (blocks[:, None] * self.stride + np.arange(size)).reshape(-1)
        return slots

    def peek(self, layer: int, slots: np.ndarray) -> torch.Tensor:
        """Return a copy [n, heads, 2, head_dim] of slots [n] of a layer, on the cache's device."""
        return self._access.peek(layer, *self.split(slots))

    def poke(self, layer: int, slots: np.ndarray, values: torch.Tensor) -> None:
        """Write what `peek` returned back to slots [n], but not to the shadow."""
        self._access.poke(layer, *self.split(slots), values)

    def read(self, layer: int, slots: np.ndarray) -> torch.Tensor:
        """Return the rows [n, heads, width] of slots [n] as they are now, on the host.

        A value within the tolerance of a code's becomes the code's.
        """
        return self._access.rows(layer, *self.split(slots), self.tolerance).cpu()

    def restore(self, layer: int, slots: np.ndarray) -> None:
        """Write into slots [n] the codes that their values are within the tolerance of."""
        if len(slots):
            self.write_rows(layer, slots, self.read(layer, slots).numpy())

    def mismatches(
        self, layer: int, slots: np.ndarray, content: Content, which: Index = ALL
    ) -> np.ndarray:
        """Return the indices into `slots` that do not hold a part of `content`.

        The nonce lanes are not compared.
        """
        return np.flatnonzero(self.differing(layer, slots, content, which).cpu().numpy())

    def differing(
        self, layer: int, slots: np.ndarray, content: Content, which: Index = ALL
    ) -> torch.Tensor:
        """Return a mask [n] of what `mismatches` does, on the cache's device.

        The host waits for nothing.
        """
        return self._access.differing(layer, *self.split(slots), content, which, self.tolerance)

    def foreign(self) -> list[np.ndarray]:
        """Return the slots of each layer that were changed, but not by the engine.

        Each change is returned once.
        """
        return [self.changed_slots(touched) for touched in self.changes()]

    @property
    def untouched(self) -> bool:
        """Whether it is certain that only the engine changed any layer.

        On CUDA it is never certain: to find out would make the host wait.
        """
        return self._access.untouched

    def changes(self) -> list[torch.Tensor | None]:
        """Return what `foreign` does, as masks on the cache's device; see `changed_slots`.

        None if a layer was not changed. On CUDA the host waits for nothing.
        """
        return self._access.changes()

    def changed_slots(self, touched: torch.Tensor | None) -> np.ndarray:
        """Return the slots [n] of a mask that `changes` returned."""
        if touched is None:
            return np.empty(0, dtype=np.int64)
        blocks, offsets = np.nonzero(touched.cpu().numpy().reshape(self.num_blocks, -1))
        return blocks * self.stride + offsets


class SlicedCache(PagedCache):
    """The KV cache of a rank that holds a slice of every block: decode context parallelism.

    A block of the scheduler spans `ranks` times the tokens of a block in a rank's memory. Slots are
    the scheduler's, as everywhere in the harness; only this class knows where in its rank's memory
    they are. Writes to slots of other ranks are dropped, and those slots are never found wrong.
    `block_size` is the scheduler's; ValueError if it cannot be split.
    """

    def __init__(
        self, book: CodeBook, num_blocks: int, block_size: int, share: Slice, **kwargs: Any
    ) -> None:
        if block_size % (share.ranks * share.run):
            raise ValueError(
                f"blocks of {block_size} tokens cannot be split over {share.ranks} ranks"
            )
        self.share = share
        super().__init__(book, num_blocks, block_size, **kwargs)

    @property
    def registered(self) -> tuple[Group, ...]:
        """See PagedCache."""
        return tuple(
            replace(group, block_size=group.block_size // self.share.ranks) for group in self.groups
        )

    def _layers(
        self, pages: torch.Tensor, depth: int, group: Group, layout: str
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        mine = replace(group, block_size=group.block_size // self.share.ranks)
        return super()._layers(pages[: pages.numel() // self.share.ranks], depth, mine, layout)

    def _mine(self, slots: np.ndarray) -> np.ndarray:
        """Return the indices of the slots that this rank holds."""
        return np.flatnonzero(self.share.has(slots % self.stride))

    def _place(self, blocks: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See PagedCache."""
        return super()._place(blocks, self.share.inside(offsets))

    def mapping(self, slots: np.ndarray, group: Group) -> np.ndarray:
        """See PagedCache."""
        offsets = slots % self.stride
        own_size = group.block_size // self.share.ranks
        here = slots // self.stride * own_size + self.share.inside(offsets)
        return np.where(self.share.has(offsets), here, -1)

    def write(self, layer: int, slots: np.ndarray, content: Content, which: Index = ALL) -> None:
        """See PagedCache."""
        mine = self._mine(slots)
        super().write(layer, slots[mine], content, part_of(which, mine))

    def write_rows(self, layer: int, slots: np.ndarray, rows: np.ndarray) -> None:
        """See PagedCache."""
        mine = self._mine(slots)
        super().write_rows(layer, slots[mine], rows[mine])

    def _copy(self, layer: int, source: np.ndarray, target: np.ndarray) -> None:
        """See PagedCache. A rank holds the same slots of both blocks."""
        mine = self._mine(source)
        super()._copy(layer, source[mine], target[mine])

    def peek(self, layer: int, slots: np.ndarray) -> torch.Tensor:
        """See PagedCache. Only of slots that this rank holds."""
        return super().peek(layer, slots[self._mine(slots)])

    def poke(self, layer: int, slots: np.ndarray, values: torch.Tensor) -> None:
        """See PagedCache."""
        super().poke(layer, slots[self._mine(slots)], values)

    def differing(
        self, layer: int, slots: np.ndarray, content: Content, which: Index = ALL
    ) -> torch.Tensor:
        """See PagedCache."""
        mine = self._mine(slots)
        found = super().differing(layer, slots[mine], content, part_of(which, mine))
        mask = torch.zeros(len(slots), dtype=torch.bool, device=found.device)
        return mask.index_copy_(0, device.current.upload(torch.from_numpy(mine)), found)

    def changed_slots(self, touched: torch.Tensor | None) -> np.ndarray:
        """See PagedCache."""
        slots = super().changed_slots(touched)
        return slots // self.stride * self.stride + self.share.outside(slots % self.stride)
