# SPDX-License-Identifier: Apache-2.0
"""The ranks of one engine: workers among which heads, layers or tokens are split.

Heads are split by tensor parallelism, layers by pipeline parallelism, the tokens of a block by
decode context parallelism. All ranks live in this process. While one runs, vLLM's parallel groups
say so; `torch.distributed` itself knows one process.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from vllm.distributed import parallel_state
from vllm.distributed.utils import get_pp_indices

from kvconform.compat.vllm_api import ModelRunnerOutput, init_parallel_state
from kvconform.contract.case import Config
from kvconform.contract.trace import Trace
from kvconform.engine.lifecycle import Lifecycle
from kvconform.engine.worker import Worker
from kvconform.kernels.codes import CodeBook
from kvconform.kv import device
from kvconform.kv.cache import Group, PagedCache, Slice, SlicedCache
from kvconform.kv.content import Content
from kvconform.kv.provenance import HandedOut, Registry


@dataclass(frozen=True)
class Place:
    """Where a rank stands: pipeline stage `pp` of `stages`, shard `tp` of `shards`.

    `slices`: ranks that the tokens of a block are split over, neighbours among the shards, `run`
    tokens in a row each. If there are several, the heads are not split; if there are fewer than
    shards, several ranks have the same tokens.
    """

    pp: int
    tp: int
    stages: int
    shards: int
    slices: int = 1
    run: int = 1

    @property
    def rank(self) -> int:
        """Number of the rank; the shards of a stage are neighbours."""
        return self.pp * self.shards + self.tp

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.stages * self.shards == 1

    @property
    def samples(self) -> bool:
        """Whether this rank's output goes to the scheduler.

        It is the first rank of the last stage, as in vLLM's executor.
        """
        return self.pp == self.stages - 1 and self.tp == 0


def places(settings: Config, *, with_connector: bool) -> list[Place]:
    """Return the places of all ranks in the order in which they are driven.

    That is stage by stage, and the rank that samples last. Without a connector there is one rank.
    """
    stages = shards = slices = run = 1
    if with_connector:
        stages = settings.pipeline_parallel
        shards = settings.tensor_parallel
        slices, run = settings.context_parallel, settings.context_interleave
    found = [
        Place(pp, tp, stages, shards, slices, run) for pp in range(stages) for tp in range(shards)
    ]
    return sorted(found, key=lambda place: (place.samples, place.rank))


class RankBook:
    """The part of a code book that one rank's cache holds: some of its layers and heads.

    `layers`: indices of the layers of the rank's stage. `latent`: the heads are not split.
    """

    def __init__(self, book: CodeBook, place: Place, layers: range, *, latent: bool) -> None:
        shards = 1 if latent else place.shards
        if not layers or book.heads % shards:
            raise ValueError(
                f"{book.layers} layers and {book.heads} heads cannot be split over"
                f" {place.stages} x {place.shards} ranks"
            )
        self.whole = book
        self.head_dim = book.head_dim
        self.width = book.width
        self.layers = len(layers)
        self.heads = book.heads // shards
        self.layer = layers.start
        self.head = 0 if latent else place.tp * self.heads
        self.content_mask = book.content_mask
        self.read_print = book.read_print

    def rows(self, content: np.ndarray, nonce: int = 0) -> np.ndarray:
        """Convert content ids [n] to rows [n, layers, heads, width] of this rank."""
        whole = self.whole.rows(content, nonce)
        layers = slice(self.layer, self.layer + self.layers)
        heads = slice(self.head, self.head + self.heads)
        return np.ascontiguousarray(whole[:, layers, heads])


class RankRegistry:
    """A registry as one rank's oracle uses it: layers and heads count from the rank's first."""

    def __init__(self, registry: Registry, book: RankBook) -> None:
        self._registry = registry
        self.book = book

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def decode(self, value: int) -> tuple[int, int, int, int] | None:
        """Return (content id, layer, K or V, head) of a fingerprint, or None.

        The number of another rank's layer or head is negative or too large.
        """
        hit = self._registry.decode(value)
        if hit is None:
            return None
        content, layer, kv, head = hit
        return content, layer - self.book.layer, kv, head - self.book.head


def layers_of(place: Place, hidden: int) -> range:
    """Return the numbers of the layers of a stage, in a model of `hidden` layers."""
    if place.stages == 1:
        return range(hidden)
    return range(*get_pp_indices(hidden, place.pp, place.stages))


def stage_of(place: Place, numbers: Sequence[int], hidden: int) -> range:
    """Return the indices of the layers with KV that the stage of `place` has.

    `numbers` are those of all layers with KV, in a model of `hidden` layers. vLLM gives the stages
    unlike numbers of layers if they cannot be equal.
    """
    own = layers_of(place, hidden)
    return range(bisect_left(numbers, own.start), bisect_left(numbers, own.stop))


def shard(
    registry: Registry,
    place: Place,
    num_blocks: int,
    block_size: int,
    layout: str,
    numbers: Sequence[int],
    hidden: int,
    groups: Sequence[Group] = (),
    kernel_block_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[PagedCache, Registry]:
    """Return the cache of one rank, and the registry that its worker and oracle use.

    If there is one rank, they are those of the whole model, whose layers with KV have `numbers`, of
    `hidden` layers. `groups` are its KV cache groups. `kernel_block_size` and `dtype`: see
    PagedCache.
    """
    options: dict[str, Any] = dict(layout=layout, kernel_block_size=kernel_block_size, dtype=dtype)
    latent = any(group.kind == "latent" for group in groups)
    layers = stage_of(place, numbers, hidden) if place.stages > 1 else range(len(numbers))
    book, own = registry.book, registry
    if place.stages > 1 or (place.shards > 1 and not latent):
        rank_book = RankBook(registry.book, place, layers, latent=latent)
        groups = _shares_of(groups, rank_book)
        book, own = cast(CodeBook, rank_book), cast(Registry, RankRegistry(registry, rank_book))
    cache: PagedCache
    if latent and not place.alone:  # one head, which cannot be split; perhaps the tokens are
        share = Slice(place.tp % place.slices, place.slices, place.run)
        cache = SlicedCache(book, num_blocks, block_size, share, groups=groups, **options)
    else:
        cache = PagedCache(book, num_blocks, block_size, groups=groups, **options)
    cache.names = [f"model.layers.{numbers[i]}.self_attn.attn" for i in layers]
    return cache, own


def _shares_of(groups: Sequence[Group], book: RankBook) -> tuple[Group, ...]:
    """Return the groups of one rank. With several, it has a layer of each.

    A state has the first head of its rank.
    """
    alone = tuple(range(book.layers))
    return tuple(
        replace(
            group,
            layers=alone if len(groups) == 1 else group.layers,
            heads=1 if group.recurrent else group.heads * book.heads // book.whole.heads,
        )
        for group in groups
    )


def config_of(config: Any, place: Place) -> Any:
    """Return the VllmConfig of one rank's process.

    It has the rank's number, and layers of its own to register.
    """
    if place.alone:
        return config
    own = copy.copy(config)
    own.parallel_config = copy.copy(config.parallel_config)
    own.parallel_config.rank = place.rank
    own.compilation_config = copy.copy(config.compilation_config)
    layers = config.compilation_config.static_forward_context
    own.compilation_config.static_forward_context = dict(layers)
    own.kv_transfer_config = copy.copy(config.kv_transfer_config)
    return own


def widen(config: Any, place: Place) -> None:
    """Write the number of ranks into the configuration, which is changed."""
    if not place.alone:
        parallel = config.parallel_config
        parallel.tensor_parallel_size = place.shards
        parallel.pipeline_parallel_size = place.stages
        parallel.world_size = place.shards * place.stages
        parallel.decode_context_parallel_size = place.slices
        parallel.cp_kv_cache_interleave_size = place.run


class _Group:
    """One rank's view of a parallel group.

    All other attributes are those of the group that this process really has.
    """

    def __init__(self, real: Any, rank: int, ranks: list[int], place: int) -> None:
        self._real = real
        self.rank = rank
        self.rank_in_group = place
        self.ranks = ranks
        self.world_size = len(ranks)
        self.is_first_rank = place == 0
        self.is_last_rank = place == len(ranks) - 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextmanager
def in_place(place: Place) -> Iterator[None]:
    """Give vLLM the parallel groups that the worker process of `place` would have."""
    if place.alone:
        yield
        return
    init_parallel_state()  # the groups of this one process
    state: Any = parallel_state
    before = state._TP, state._PP, state._DCP
    shards = [place.pp * place.shards + tp for tp in range(place.shards)]
    stages = [pp * place.shards + place.tp for pp in range(place.stages)]
    state._TP = _Group(before[0], place.rank, shards, place.tp)
    state._PP = _Group(before[1], place.rank, stages, place.pp)
    if place.slices > 1:
        first = place.tp - place.tp % place.slices
        slices = shards[first : first + place.slices]
        state._DCP = _Group(before[2], place.rank, slices, place.tp - first)
    try:
        yield
    finally:
        state._TP, state._PP, state._DCP = before


class Follower(Worker):
    """A worker that does not sample.

    It computes the rows of the leader, the rank that samples, and shares its record of wrong reads.
    """

    leader: Worker

    def begin(self, output: Any, fresh: list[HandedOut]) -> None:
        """Take over the rows of the leader; to be called after its `begin` and before its step."""
        leader = self.leader
        self.fresh = fresh
        self.rows = leader.rows
        self._nonce = leader._nonce
        self._copies = leader._copies
        self._corruption = leader._corruption
        self.unsound = {}
        if output.total_num_scheduled_tokens:
            book = self.cache.book
            self._computed = Content.of(book, leader._computed.ids, self._nonce)
            self._reads = [
                replace(reads, expected=Content.of(book, reads.expected.ids, reads.expected.nonce))
                for reads in leader._reads
            ]

    def sample(self) -> ModelRunnerOutput:
        """Return an output without tokens; the connector's reports are added to it."""
        self.device.finish()
        return cast(ModelRunnerOutput, SimpleNamespace(kv_connector_output=None))


@dataclass
class Rank:
    """One worker with its half of the connector. The last three fields are filled in one by one."""

    place: Place
    cache: PagedCache
    registry: Registry
    config: Any
    cache_config: Any
    half: Any = None
    worker: Worker = field(init=False)
    lifecycle: Lifecycle = field(init=False)


class Ranks:
    """The ranks of one engine, in the order in which they are driven; the last one samples."""

    def __init__(self, members: list[Rank], trace: Trace) -> None:
        self.members = members
        self._trace = trace
        self.current = members[-1]
        """The rank that runs now; outside of a step, the one that samples."""

    @property
    def leader(self) -> Rank:
        """The rank that samples."""
        return self.members[-1]

    @property
    def first(self) -> Rank:
        """Rank 0, whose KVCacheConfig the scheduler and its half get, too."""
        return next(rank for rank in self.members if rank.place.rank == 0)

    @contextmanager
    def driving(self, rank: Rank) -> Iterator[None]:
        """Set what belongs to a rank's process: vLLM's parallel groups, `current`, `Trace.rank`."""
        if rank.place.alone:
            yield
            return
        before = self.current
        self.current = rank
        self._trace.rank = rank.place.rank
        device.current.driving(rank.place.rank)
        try:
            with in_place(rank.place):
                yield
        finally:
            device.current.driving(0)
            self._trace.rank = None
            self.current = before
