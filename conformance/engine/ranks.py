# SPDX-License-Identifier: Apache-2.0
"""The workers of one engine when heads (tensor parallel) or layers (pipeline parallel) are split.

All ranks live in this process. While one runs, vLLM's tensor and pipeline groups say so;
`torch.distributed` itself knows one process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from vllm.distributed import parallel_state

from kvconform.compat.vllm_api import ModelRunnerOutput, init_parallel_state
from kvconform.contract.case import Config
from kvconform.contract.trace import Trace
from kvconform.engine.lifecycle import Lifecycle
from kvconform.engine.worker import Worker
from kvconform.kernels.codes import CodeBook
from kvconform.kv.cache import Group, PagedCache, SlicedCache
from kvconform.kv.provenance import Registry


@dataclass(frozen=True)
class Place:
    """Where a rank stands: pipeline stage `pp` of `stages`, shard `tp` of `shards`; ranks count shards first."""

    pp: int
    tp: int
    stages: int
    shards: int
    slices: int = (
        1  # ranks, the shards, that the tokens of a block are split over, and not the heads
    )

    @property
    def rank(self) -> int:
        return self.pp * self.shards + self.tp

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.stages * self.shards == 1

    @property
    def samples(self) -> bool:
        """Whether this rank's output goes to the scheduler: the first one of the last stage, as in vLLM's executor."""
        return self.pp == self.stages - 1 and self.tp == 0


def places(settings: Config, *, with_connector: bool) -> list[Place]:
    """The ranks in the order in which they are driven: stage by stage, the one that samples last. One if there is no connector."""
    stages, shards = (
        (settings.pipeline_parallel, settings.tensor_parallel) if with_connector else (1, 1)
    )
    slices = settings.context_parallel if with_connector else 1
    found = [Place(pp, tp, stages, shards, slices) for pp in range(stages) for tp in range(shards)]
    return sorted(found, key=lambda place: (place.samples, place.rank))


class RankBook:
    """The part of a code book that one rank's cache holds: some of its layers, some of its heads."""

    def __init__(self, book: CodeBook, place: Place) -> None:
        if book.layers % place.stages or book.heads % place.shards:
            raise ValueError(
                f"{book.layers} layers and {book.heads} heads cannot be split over {place.stages} x {place.shards} ranks"
            )
        self.whole, self.head_dim, self.width = book, book.head_dim, book.width
        self.layers, self.heads = book.layers // place.stages, book.heads // place.shards
        self.layer, self.head = place.pp * self.layers, place.tp * self.heads
        self.content_mask, self.read_print = book.content_mask, book.read_print

    def rows(self, content: np.ndarray, nonce: int = 0) -> np.ndarray:
        """Content ids [n] to rows [n, layers, heads, width] of this rank."""
        whole = self.whole.rows(content, nonce)
        return np.ascontiguousarray(
            whole[:, self.layer : self.layer + self.layers, self.head : self.head + self.heads]
        )


class RankRegistry:
    """A registry as one rank's oracle asks it: layers and heads count from the rank's own first ones."""

    def __init__(self, registry: Registry, book: RankBook) -> None:
        self._registry, self.book = registry, book

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def decode(self, value: int) -> tuple[int, int, int, int] | None:
        """(content id, layer, K or V, head); a layer or head of another rank is negative or too large."""
        hit = self._registry.decode(value)
        return (
            None
            if hit is None
            else (hit[0], hit[1] - self.book.layer, hit[2], hit[3] - self.book.head)
        )


def shard(
    registry: Registry,
    place: Place,
    num_blocks: int,
    block_size: int,
    layout: str,
    groups: Sequence[Group] = (),
) -> tuple[PagedCache, Registry]:
    """The cache of one rank, and the registry that its worker and oracle use; both are the whole, with `groups`, if there is one rank."""
    if place.alone:
        return PagedCache(
            registry.book, num_blocks, block_size, layout=layout, groups=groups
        ), registry
    if place.slices > 1:
        held = SlicedCache(
            registry.book,
            num_blocks,
            block_size,
            place.tp,
            place.slices,
            layout=layout,
            groups=groups,
        )
        return held, registry
    book = RankBook(registry.book, place)
    cache = PagedCache(cast(CodeBook, book), num_blocks, block_size, layout=layout)
    cache.names = [f"model.layers.{book.layer + i}.self_attn.attn" for i in range(book.layers)]
    return cache, cast(Registry, RankRegistry(registry, book))


def config_of(config: Any, place: Place) -> Any:
    """The VllmConfig of one rank's process: it differs in its rank, and has layers of its own to register."""
    if place.alone:
        return config
    own, parallel, compilation = (
        copy.copy(config),
        copy.copy(config.parallel_config),
        copy.copy(config.compilation_config),
    )
    parallel.rank, compilation.static_forward_context = place.rank, {}
    own.kv_transfer_config = copy.copy(config.kv_transfer_config)
    own.parallel_config, own.compilation_config = parallel, compilation
    return own


def widen(config: Any, place: Place) -> None:
    """Tell the configuration how many ranks there are (changes it)."""
    if not place.alone:
        parallel = config.parallel_config
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size = place.shards, place.stages
        parallel.world_size = place.shards * place.stages
        parallel.decode_context_parallel_size = place.slices


class _Group:
    """One rank's view of a parallel group; whatever else is asked goes to the group that this process really has."""

    def __init__(self, real: Any, rank: int, ranks: list[int], place: int) -> None:
        self._real, self.rank, self.rank_in_group, self.ranks, self.world_size = (
            real,
            rank,
            place,
            ranks,
            len(ranks),
        )
        self.is_first_rank, self.is_last_rank = place == 0, place == len(ranks) - 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextmanager
def in_place(place: Place) -> Iterator[None]:
    """VLLM's parallel groups as the worker process of `place` has them."""
    if place.alone:
        yield
        return
    init_parallel_state()  # of one process, before there are more on paper
    state: Any = parallel_state
    before = state._TP, state._PP, state._DCP
    shards = [place.pp * place.shards + tp for tp in range(place.shards)]
    stages = [pp * place.shards + place.tp for pp in range(place.stages)]
    state._TP, state._PP = (
        _Group(before[0], place.rank, shards, place.tp),
        _Group(before[1], place.rank, stages, place.pp),
    )
    if place.slices > 1:
        state._DCP = _Group(before[2], place.rank, shards, place.tp)
    try:
        yield
    finally:
        state._TP, state._PP, state._DCP = before


class Follower(Worker):
    """A worker that does not sample: it computes the rows of the rank that does, and hands on what it found corrupt."""

    leader: Worker

    def begin(self, output: Any, fresh: list[tuple[int, str]]) -> None:
        """After the leader's `begin`, before its step."""
        leader = self.leader
        self.fresh, self.rows, self._nonce = fresh, leader.rows, leader._nonce
        self._corruption = leader._corruption
        if output.total_num_scheduled_tokens:
            self._encoded = self.cache.book.rows(
                np.concatenate([row.content() for row in self.rows]), self._nonce
            )
            expected = np.concatenate(
                [self.cache.book.rows(row.state.chain.array(0, row.known)) for row in self.rows]
            )
            self._reads = [replace(leader._reads[0], expected=expected)]

    def sample(self) -> ModelRunnerOutput:
        """An output that says nothing but what the connector reports."""
        self.device.finish()
        return cast(ModelRunnerOutput, SimpleNamespace(kv_connector_output=None))


@dataclass
class Rank:
    """One worker with its half of the connector. The last three are filled in one by one."""

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
        self.members, self._trace = members, trace
        self.current = members[-1]
        """The rank that runs now; outside of a step, the one that samples."""

    @property
    def leader(self) -> Rank:
        """The rank that samples."""
        return self.members[-1]

    @contextmanager
    def driving(self, rank: Rank) -> Iterator[None]:
        """Put what belongs to a rank's process in place: vLLM's parallel groups, and `current`."""
        if rank.place.alone:
            yield
            return
        before, self.current = self.current, rank
        self._trace.rank = rank.place.rank
        try:
            with in_place(rank.place):
                yield
        finally:
            self._trace.rank = None
            self.current = before
