# SPDX-License-Identifier: Apache-2.0
"""Planted defects with several ranks: connectors that mix up shards or reports, and engine faults.

The engine faults are in the aggregation of the ranks' reports, and in steps without tokens.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvconform.compat.vllm_api import ModelRunnerOutput
from kvconform.refimpl.cache.chunks import open_store
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.defects import targets
from kvconform.refimpl.faulty import Target, with_arguments
from kvconform.refimpl.keys import root_key
from kvconform.refimpl.plan import Load, Piece, ReferenceMetadata, Save
from kvconform.refimpl.variants.plain import Plain
from kvconform.refimpl.variants.ranks import Drifting, OwnShards
from kvconform.refimpl.variants.threads import SavingThreads

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput

AGGREGATOR = "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator"
AGGREGATE = Target(f"{AGGREGATOR}.aggregate")


class _Ranked(ReferenceConnector):
    """Knows its rank."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._rank = vllm_config.parallel_config.rank
        self._world = vllm_config.parallel_config.world_size


class OneShardForAll(_Ranked):
    """Omits the rank from its keys: each rank overwrites what the other has stored."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._store = open_store(self.options.store)


class NumbersItsLayers(OneShardForAll):
    """Puts the layer's number in the rank's own list into its keys: every stage counts from 0."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(
            {str(number): layer for number, layer in enumerate(kv_caches.values())}
        )


class OnlyFirstStores(OneShardForAll):
    """Stores and loads on the first rank only, although the KV is split over the ranks.

    This would be right for attention whose KV is the same on all ranks.
    """

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        if self._rank == 0:
            super()._save_layer(epoch, save, layer, kv_layer)

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        if self._rank == 0:
            super()._load(load, layers)


class DrafterOnFirstRank(_Ranked):
    """Leaves the drafter's layer to the first rank, as if the ranks did not split its heads."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = list(kv_caches.items())
        super().register_kv_caches(dict(layers[:-1] if self._rank else layers))


class UnscaledBlocks(ReferenceConnector):
    """Counts with the block size of one rank's memory (B130).

    The engine's blocks are a multiple of that.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size


class UnscaledHits(Plain):
    """Counts hits and grants with the block size of one rank's memory.

    It claims less than it has, and loads the right blocks as long as there is no local hit.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = vllm_config.cache_config.block_size


class EqualStages(Plain):
    """Numbers the layers as if every pipeline stage had as many.

    All ranks keep what they store in one place, under that number.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._stage = parallel.rank // parallel.tensor_parallel_size
        self._blocks = self._stores.setdefault(f"all ranks of {self._name}", {})

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        first = self._stage * len(self._layers)
        self._layers = {
            str(first + index): layer for index, layer in enumerate(self._layers.values())
        }


class RoomByOwnLayers(Plain):
    """Divides its room by the bytes of a block in the layers of its own stage (B156).

    The scheduler half counts with those of the first stage. What was stored first goes first.
    """

    ROOM = 40_960
    """Bytes, of all blocks of a rank."""

    def _most(self) -> int:
        """Return how many blocks there is room for."""
        cache = self._kv_cache_config
        return self.ROOM // (sum(each.size for each in cache.kv_cache_tensors) // cache.num_blocks)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        for entry in list(self._index)[: -self._most()]:
            del self._index[entry]
        return super().build_connector_meta(scheduler_output)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        for entry in list(self._blocks)[: -self._most() * len(self._layers)]:
            del self._blocks[entry]


class TwoSlices(ReferenceConnector):
    """Takes the ranks that the tokens of a block are split over for two, as they often are."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self._share.ranks > 1:
            self._share = self._share._replace(rank=self._share.rank % 2, ranks=2)


class OneRootForAllDegrees(ReferenceConnector):
    """Has the number of ranks in its keys, and not over how many the tokens of a block are split.

    Engines with as many ranks then share keys for chunks that differ.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = copy.copy(vllm_config)
        config.parallel_config = copy.copy(vllm_config.parallel_config)
        config.parallel_config.decode_context_parallel_size = 1
        self._root = root_key(config)


class FirstHeads(_Ranked):
    """Loads the first rank's heads on every rank."""

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        own, self._store = self._store, open_store(self.options.store, 0, self._world)
        super()._load(load, layers)
        self._store = own


class _CountsFirstRank(ReferenceConnector):
    """Counts a chunk as stored once the first rank has stored it.

    What another rank does not find, it does not load. Base of connectors whose ranks store at
    different times.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._store.has = open_store(self.options.store).has  # type: ignore[method-assign]

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        super()._load_layer(piece, layer)
        return True


class ClaimsForOneRank(_CountsFirstRank, Drifting):
    """Claims what one rank has stored; the transfers of the next take two steps longer."""


class StoredOnOneRank(_CountsFirstRank, SavingThreads):
    """Claims what a thread of one rank has stored; those of the next get time later."""


class OnlyFirstReports(_Ranked):
    """Reports finished loads on the first rank only, although the engine waits for every rank."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        return sent, received if self._rank == 0 else None


class ReportsForAll(Drifting):
    """Reports a load on the first rank, once for every rank, in as many steps."""

    _again: frozenset[str] = frozenset()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        again, self._again = self._again, frozenset(received or ())
        if self._vllm_config.parallel_config.rank:
            return sent, None
        return sent, (received or set()) | again or None


class WaitsForOne(Drifting):
    """Lets the engine wait for one report, although each rank loads a shard of its own."""

    def get_finished_count(self) -> int | None:
        return 1


class EndedSaves(NamedTuple):
    """Saves that ended on a rank, or on several: how many of each request."""

    counts: Counter[str]

    def aggregate(self, other: EndedSaves) -> EndedSaves:
        """Add those of another rank."""
        return EndedSaves(self.counts + other.counts)


class _CountsSaves(Drifting):
    """Keeps the engine going until all ranks have reported each save, which is right."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Scheduler half: reports that are awaited, and those that have come.
        self._awaited: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        # Worker half.
        self._ended: Counter[str] = Counter()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        world = self._vllm_config.parallel_config.world_size
        for save in metadata.saves:
            self._awaited[save.req] += world
        return metadata

    def _save(self, epoch: int, save: Save, layers: Iterable[str]) -> None:
        super()._save(epoch, save, layers)
        self._ended[save.req] += 1

    def build_connector_worker_meta(self) -> Any:
        ended, self._ended = self._ended, Counter()
        return EndedSaves(ended) if ended else None

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if (ended := connector_output.kv_connector_worker_meta) is not None:
            self._reported += ended.counts
        for req in [req for req, count in self._awaited.items() if self._reported[req] >= count]:
            del self._awaited[req], self._reported[req]

    def has_pending_push_work(self) -> bool:
        return bool(self._awaited)


class ForgetsReports(_CountsSaves):
    """Counts which saves all ranks have ended, and forgets at a reset what some have reported.

    The reports of the other ranks, which come later, are then too few.
    """

    def reset_cache(self) -> bool | None:
        self._reported.clear()
        return super().reset_cache()


class CountsLeftBehind(EndedSaves):
    """Saves that ended, in a form that leaves the counts out when it is pickled."""

    def __reduce__(self) -> Any:
        return CountsLeftBehind, (Counter(),)


class SendsNoCounts(_CountsSaves):
    """Waits until all ranks have ended a save, and reports that in what pickling leaves out.

    It works as long as both halves are in one process.
    """

    def build_connector_worker_meta(self) -> Any:
        ended = super().build_connector_worker_meta()
        return None if ended is None else CountsLeftBehind(ended.counts)


class LocksReports(Drifting):
    """Puts a lock into what its workers report, which cannot leave their processes."""

    def build_connector_worker_meta(self) -> Any:
        return LockedSaves(Counter(), threading.Lock())


class LockedSaves(NamedTuple):
    """Saves that ended, with a lock for those who count them."""

    counts: Counter[str]
    lock: Any

    def aggregate(self, other: LockedSaves) -> LockedSaves:
        """Add those of another rank."""
        return LockedSaves(self.counts + other.counts, self.lock)


class RenamesTheEngine(ReferenceConnector):
    """Appends its rank to the engine id, so that its sockets have distinct names."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role.name == "WORKER":
            vllm_config.kv_transfer_config.engine_id += f"-{vllm_config.parallel_config.rank}"


def _expects_one(aggregator: Any, expected_finished_count: int) -> tuple[Any, int]:
    return aggregator, 1


first_report_counts = Target(f"{AGGREGATOR}.__init__").replaced_by(with_arguments(_expects_one))
"""Count a transfer as finished when the first rank reports it."""


def _others(outputs: list[Any], output_rank: int) -> list[Any]:
    """Return what the ranks that do not sample report."""
    return [
        output.kv_connector_output
        for rank, output in enumerate(outputs)
        if rank != output_rank and output.kv_connector_output
    ]


@AGGREGATE.before
def drops_stages(aggregator: Any, outputs: list[Any], output_rank: int = 0) -> None:
    """Drop the finished transfers that a rank reports which does not sample."""
    for other in _others(outputs, output_rank):
        other.finished_sending = other.finished_recving = None


@AGGREGATE.before
def errors_of_one_rank(aggregator: Any, outputs: list[Any], output_rank: int = 0) -> None:
    """Ignore the failed blocks of a rank that does not sample."""
    for other in _others(outputs, output_rank):
        other.invalid_block_ids = set()


@AGGREGATE.replaced_by
def failures_at_once(
    aggregate: Any, aggregator: Any, outputs: list[Any], output_rank: int = 0
) -> Any:
    """Pass a failed load on as soon as one rank reports it, while others still write."""
    failed = {
        req
        for output in outputs
        if output.kv_connector_output
        for req in output.kv_connector_output.failed_recving
    }
    result = aggregate(aggregator, outputs, output_rank)
    result.kv_connector_output.failed_recving = failed
    return result


def _samples_nothing(life: Any, output: Any) -> bool:
    """Whether this is the rank that samples, in a step without tokens."""
    parallel = life.config.parallel_config
    # As in vllm/v1/executor/multiproc_executor.py, _get_output_rank.
    output_rank = parallel.world_size - parallel.tensor_parallel_size
    return not output.total_num_scheduled_tokens and parallel.rank == output_rank


@targets.VLLM_V1_STEP.after
def waits_for_its_own_tokens(_: Any, life: Any, output: Any) -> None:
    """In a step without tokens, let the last stage receive the sampled tokens, and assert (B114).

    Only that stage could send them.
    """
    assert not _samples_nothing(life, output), "the last stage has no stage to receive tokens from"


@targets.VLLM_V1_STEP.replaced_by
def last_stage_sits_out(step: Any, life: Any, output: Any) -> Any:
    """Return from a step without tokens before the last stage calls the connector."""
    if _samples_nothing(life, output):
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[])
    return step(life, output)


class OnlyFirstRankNames(OwnShards):
    """Only its first rank names blocks that were not loaded, also if another one lacks them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._is_first = vllm_config.parallel_config.rank == 0

    def get_block_ids_with_load_errors(self) -> set[int]:
        found = super().get_block_ids_with_load_errors()
        return found if self._is_first else set()


class KeepsOwnShard(OwnShards):
    """A rank that has stored its shard of a chunk does not store it again.

    If another rank's load of the step failed, the shard is made of garbage.
    """

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        missing = tuple(piece for piece in save.pieces if not self._store.has(piece.key))
        super()._save_layer(epoch, replace(save, pieces=missing), layer, kv_layer)


class EarlyOnFastRank(Drifting):
    """Its first rank reports a load when it begins; the other one, which is slower, is honest."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._is_first = vllm_config.parallel_config.rank == 0

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        if self._is_first:
            received = {load.req for load in self._metadata().loads if load.is_async} or None
        return sent, received
