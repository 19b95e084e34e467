# SPDX-License-Identifier: Apache-2.0
"""How one engine executes a step: on every rank in turn, and what the ranks report as one.

Ranks: the workers of one engine when heads (tensor parallel) or layers (pipeline parallel) are split.

All ranks live in this process. While one runs, vLLM's tensor and pipeline groups say so; `torch.distributed` itself knows one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from vllm.distributed import parallel_state

from kvconform.compat.vllm_api import ModelRunnerOutput, init_parallel_state
from kvconform.contract.case import Config
from kvconform.contract.trace import Trace
from kvconform.engine.batch import Batch, Info
from kvconform.engine.fault import check_starts
from kvconform.engine.lifecycle import Lifecycle, in_order
from kvconform.engine.worker import Worker
from kvconform.kernels.codes import CodeBook
from kvconform.kv import device
from kvconform.kv.cache import Group, PagedCache, SlicedCache
from kvconform.kv.oracle import Oracle
from kvconform.kv.provenance import Chain, Registry
from kvconform.observe.digest import pickle_round_trip
from kvconform.observe.ledger import Joined, Ledger
from kvconform.observe.observer import Observer


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
    """vLLM's parallel groups as the worker process of `place` has them."""
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
    """One worker with its half of the connector."""

    place: Place
    cache: PagedCache
    registry: Registry
    config: Any
    cache_config: Any
    half: Any = None
    worker: Any = None
    lifecycle: Lifecycle | None = None


class EngineExecution:
    """The ranks of an engine, the last of which samples. Every method but the context changes the engine and the trace."""

    trace: Trace
    ranks: list[Rank]
    worker: Worker
    oracle: Oracle
    batch: Batch
    scheduler: Any
    connector: Any
    observer: Observer
    ledger: Ledger
    inspector: Any
    aggregator: Joined | None
    pickle_metadata: bool
    info: Callable[[str], Info]
    depth: int
    progress: int
    reported_now: set[str] = set()

    @contextmanager
    def _as(self, rank: Rank) -> Iterator[None]:
        """What belongs to one rank's process is in place: vLLM's parallel groups, and whom the listeners look at."""
        if rank.place.alone:
            yield
            return
        self.trace.rank = rank.place.rank
        before = getattr(self, "worker", None)
        if before is not None and rank.worker is not None:
            self.worker, self.oracle = rank.worker, rank.worker.oracle
            if hasattr(self, "observer"):
                self.observer.oracle = self.oracle
        try:
            with in_place(rank.place):
                yield
        finally:
            self.trace.rank = None
            if before is not None:
                self.worker, self.oracle = before, before.oracle
                if hasattr(self, "observer"):
                    self.observer.oracle = before.oracle

    def _execute(self, output: Any, fresh: list[tuple[int, str]]) -> Any:
        check_starts(output)
        meta = output.kv_connector_metadata
        if self.connector is not None:
            self.observer.current_digest = self.observer.take_digest(meta)
            if self.inspector is not None:
                self._plan(meta)
            if self.pickle_metadata:
                unpickled, reason = pickle_round_trip(meta)
                if reason is None:
                    output.kv_connector_metadata = unpickled
        self.worker.begin(output, fresh)
        total, first = output.total_num_scheduled_tokens, len(self.trace.events)
        self.trace.emit(
            "worker.step_begin",
            forward=total > 0,
            tokens=total,
        )
        self.oracle.failed_blocks, self.oracle.failed_reqs, self.reported_now = set(), set(), set()
        self.observer.activity += 1 if total else 0
        self.worker.scheduled = set(output.num_scheduled_tokens)
        result, failed = self._step_of_ranks(output, fresh)
        if self.depth > 1:
            for rank in self.ranks:
                rank.worker.overlap.take_back()
        self.ledger.after_execute(self.worker.rows, failed)
        ended = dict(forward=total > 0, tokens=total)
        self.trace.emit(
            "worker.step_end",
            **ended,
            ranks=self._bound_since(first) if len(self.ranks) > 1 else [],
        )
        if total or self.reported_now:
            self.progress += 1
        return result

    def _bound_since(self, first: int) -> list[int]:
        """Ranks whose half was given metadata since event `first`."""
        bound = [
            e
            for e in self.trace.events[first:]
            if e["kind"] == "hook.called" and e["hook"] == "bind_connector_metadata"
        ]
        return sorted({e["rank"] for e in bound if e["depth"] == 0})

    def _step_of_ranks(self, output: Any, fresh: list[tuple[int, str]]) -> tuple[Any, set[str]]:
        """Run the step on every rank; returns the output of the one that samples, and the requests whose loads failed on any rank."""
        results, failed, meta = [], set[str](), output.kv_connector_metadata
        for rank in self.ranks:
            with self._as(rank):
                if rank.worker is not self.ranks[-1].worker:
                    rank.worker.begin(output, list(self.ranks[-1].worker.fresh))
                if self.aggregator is not None:  # every worker process unpickles its own
                    output.kv_connector_metadata = pickle_round_trip(meta)[0] or meta
                self.oracle.failed_blocks, self.oracle.failed_reqs, self.reported_now = (
                    set(),
                    set(),
                    set(),
                )
                assert rank.lifecycle is not None  # made before the first step
                results.append(copy.copy(rank.lifecycle.step(output)))
                self.oracle.check_writes("wait_for_save")
                device.current.finish()
                self._due()
                self.oracle.settle_reads()
                failed |= self._failed()
        output.kv_connector_metadata = meta
        result = results[0] if self.aggregator is None else self.aggregator.join(results)
        return in_order(result), failed

    def _due(self) -> None:
        for grant in self.oracle.open_grants():
            state = self.batch.requests.get(grant.req)
            if grant.is_async:
                if grant.req not in self.scheduler.requests:
                    grant.open = False  # the engine took another rank's report for the last one
                elif grant.req in self.reported_now:  # a failure may be told in any step before
                    self.oracle.due(grant, self._chain(grant.req))
            elif state is not None and grant.req in self.ranks[-1].worker.scheduled:
                self.oracle.due(grant, state.chain)

    def _failed(self) -> set[str]:
        blocks = self.oracle.failed_blocks
        if not blocks:
            return set()
        return {row.state.chain.req for row in self.worker.rows if blocks & set(row.state.table)}

    def _chain(self, req_id: str) -> Any:
        request, info = self.scheduler.requests[req_id], self.info(req_id)
        chain = Chain(req_id, info.generation, info.identity)
        for token in request.all_token_ids:
            chain.append(token)
        return chain

    def _plan(self, meta: Any) -> None:
        for entry in self.inspector.plan(meta):
            self.trace.emit("plan", **entry)
