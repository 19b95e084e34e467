# SPDX-License-Identifier: Apache-2.0
"""Planted defects: events, statistics, metrics, the handshake, and changed arguments."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kvconform.refimpl.connector import Finish, ReferenceConnector
from kvconform.refimpl.telemetry import ReferenceHandshake, ReferenceMetrics, ReferenceStats

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.request import Request

    from kvconform.refimpl.plan import Piece
    from kvconform.refimpl.tracking import Tracked


class WrongParent(ReferenceConnector):
    """Announces every block as if it were the first of its prompt."""

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = list(super().take_events())
        for event in events:
            if hasattr(event, "parent_block_hash"):
                event.parent_block_hash = None
        return events


class WrongWhenSwitchedOn(WrongParent):
    """Publishes events only where the operator has switched them on, and then wrong ones."""

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = super().take_events()
        config = self._vllm_config.kv_events_config
        return events if config is not None and config.enable_kv_cache_events else []


class ParentOfBatch(ReferenceConnector):
    """Takes the block that a step stored before for the parent, not the one before it (B151).

    The first block of a step has none, then, although the request has blocks before it.
    """

    def _expect(self, tracked: Tracked, pieces: Sequence[Piece]) -> bool:
        found = super()._expect(tracked, pieces)
        parent = None
        for piece in pieces:
            chunk = self._planned.get(piece.key)
            if chunk is not None:
                chunk.parent = parent
                parent = chunk.hashes[-1]
        return found


class OneImagePerBlock(ReferenceConnector):
    """Gives only the last one of several images that a block has a part of."""

    def _expect(self, tracked: Tracked, pieces: Sequence[Piece]) -> bool:
        found = super()._expect(tracked, pieces)
        for piece in pieces:
            chunk = self._planned.get(piece.key)
            if chunk is not None and chunk.extra_keys is not None:
                chunk.extra_keys = chunk.extra_keys[-1:]
        return found


class HashesAlone(WrongParent):
    """Publishes only the hashes of what it stores, without a parent."""

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = list(super().take_events())
        for event in events:
            if hasattr(event, "token_ids"):
                event.token_ids = []
        return events


class RemovedFromGpu(ReferenceConnector):
    """Says that blocks have left the GPU when they have left its own store."""

    def take_events(self) -> Iterable[KVCacheEvent]:
        events = list(super().take_events())
        for event in events:
            if not hasattr(event, "token_ids") and hasattr(event, "medium"):
                event.medium = "GPU"
        return events


class KeepsEvents(ReferenceConnector):
    """Returns the events of all steps so far, again in every step."""

    def take_events(self) -> Iterable[KVCacheEvent]:
        kept: list[KVCacheEvent] = self.__dict__.setdefault("_kept", [])
        kept += super().take_events()
        return list(kept)


class RebuildsEvents(KeepsEvents):
    """The same, of records that it keeps: the events of every step are new objects."""

    def take_events(self) -> Iterable[KVCacheEvent]:
        return [copy(event) for event in super().take_events()]


class SilentEviction(ReferenceConnector):
    """Publishes what it stores, and never what it evicts."""

    def _withdraw(self, keys: Iterable[str]) -> None:
        return


class PromptEventsOnly(ReferenceConnector):
    """Publishes only the first chunk that a step stores."""

    def _expect(self, tracked: Tracked, pieces: Sequence[Piece]) -> bool:
        super()._expect(tracked, pieces[:1])
        return bool(pieces)


class KeepsStats(ReferenceConnector):
    """Keeps one statistics object, and adds to it in every step."""

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        kept: ReferenceStats = self.__dict__.setdefault("_kept_stats", ReferenceStats())
        latest = super().get_kv_connector_stats()
        for name, count in (latest.data if latest else {}).items():
            kept.data[name] = kept.data.get(name, 0) + count
        return kept


class _MergesInPlace(ReferenceStats):
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data |= other.data
        return None  # type: ignore[return-value]


class MergesInPlace(ReferenceConnector):
    """Merges its statistics in place, and returns nothing from the merge."""

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = super().get_kv_connector_stats()
        if stats is None or self.role.name == "SCHEDULER":
            return None
        return _MergesInPlace(stats.data)


class TensorStats(ReferenceConnector):
    """Puts a tensor into its statistics."""

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = super().get_kv_connector_stats()
        if stats is None:
            return None
        return ReferenceStats({name: torch.tensor(count) for name, count in stats.data.items()})


class RenamedStats(ReferenceConnector):
    """Rebuilds its statistics from a name that it no longer sends."""

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return ReferenceStats({"chunks": (data or {"chunks": 0})["chunks"]})


class UnloggedStats(ReferenceConnector):
    """Collects statistics that the front end cannot rebuild."""

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return None


class _NeedsAll(ReferenceMetrics):
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(
            {name: transfer_stats_data[name] for name in ("chunks_read", "chunks_written")},
            engine_idx,
        )


class MetricsNeedAll(ReferenceConnector):
    """Expects every statistic in every interval in its metrics."""

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Any:
        return _NeedsAll(*args)


class _NamedAlike(ReferenceMetrics):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._totals = [
            self._counter_cls("kvconform_moves", what, self._labelnames)
            for what in ("chunks read", "chunks written")
        ]


class MetricsNamedAlike(ReferenceConnector):
    """Registers two metrics of one name (B120)."""

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Any:
        return _NamedAlike(*args)


class _OneEngine(ReferenceMetrics):
    def __init__(self, *args: Any) -> None:
        config, kinds, labels, by_engine = args
        super().__init__(config, kinds, labels, {0: by_engine[0]})


class MetricsOfOneEngine(ReferenceConnector):
    """Has metrics for the first of several engines only."""

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Any:
        return _OneEngine(*args)


class _AddsKnown(ReferenceStats):
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] += count
        return self


class AddsKnownStats(ReferenceConnector):
    """Rebuilds statistics that add up only what the step before had counted, too."""

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return _AddsKnown(dict(data or {}))


class _Subtracts(ReferenceStats):
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        names = {**self.data, **other.data}
        return _Subtracts(
            {name: self.data.get(name, 0) - other.data.get(name, 0) for name in names}
        )


class _NeverCleared(ReferenceStats):
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return _NeverCleared(super().aggregate(other).data)

    def reset(self) -> None:
        pass


class SubtractsStats(ReferenceConnector):
    """Subtracts statistics where it should add them."""

    Stats: ClassVar[type[ReferenceStats]] = _Subtracts

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = super().get_kv_connector_stats()
        return self.Stats(stats.data) if stats else None


class NeverClearsStats(SubtractsStats):
    """Has statistics whose reset does nothing."""

    Stats = _NeverCleared


class EmptyStats(ReferenceConnector):
    """Returns statistics only when nothing was counted."""

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None if super().get_kv_connector_stats() else ReferenceStats()


class _Renamed(ReferenceMetrics):
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name in ("reads", "writes"):
            super().observe({name: transfer_stats_data.get(name, 0)}, engine_idx)


class MetricsRenamed(ReferenceConnector):
    """Observes statistics under names that they do not have."""

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Any:
        return _Renamed(*args)


class LockedHandshake(ReferenceConnector):
    """Puts a lock into its handshake metadata."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        handshake = ReferenceHandshake("x")
        handshake.__dict__["lock"] = threading.Lock()
        return handshake


class PlainHandshake(ReferenceConnector):
    """Returns its handshake metadata as a dict."""

    def get_handshake_metadata(self) -> Any:
        return {"store": "x"}


class ConsumesReports(ReferenceConnector):
    """Removes ids from the engine's own report."""

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        (connector_output.finished_sending or set()).clear()


class ConsumesFinished(ReferenceConnector):
    """Clears the set of finished requests that it is given."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        result = super().get_finished(finished_req_ids)
        finished_req_ids.clear()
        return result


class TrimsBlocks(ReferenceConnector):
    """Shortens the list of blocks that it is given at the end of a request."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        result = super().request_finished(request, block_ids)
        del block_ids[1:]
        return result


class DeliveryMethod(ReferenceConnector):
    """Has a method where the base class has a property."""

    def requires_kv_delivery(self) -> bool:  # type: ignore[override]
        return False


class AwaitedFlush(ReferenceConnector):
    """Has a hook that is a coroutine, which is never awaited."""

    async def reset_capture_state(self) -> None:  # type: ignore[override]
        return


class PoolNeverComes(ReferenceConnector):
    """Overrides both hooks that bind the cache, without a call of the base class.

    It waits for a block pool that it never gets.
    """

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._kv_cache_manager = kv_cache_manager

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool


class CountsBlocks(ReferenceConnector):
    """Counts the blocks of a hit, where its tokens are to be counted."""

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        sources = super().get_external_cache_hit_sources(request, num_external_tokens)
        return {source: count // self._block_size for source, count in sources.items()}


class NamesAllButOne(ReferenceConnector):
    """Counts one token of each load as unspecified, and declares that it names all sources."""

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {**super().kvconform_capabilities(extra_config), "names_sources": True}

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        counts = {
            CacheHitSource.HOST: num_external_tokens - 1,
            CacheHitSource.EXTERNAL_UNSPECIFIED: 1,
        }
        return {source: count for source, count in counts.items() if count > 0}


class ReturnsPool(ReferenceConnector):
    """Returns a memory pool context that cannot be entered."""

    def get_mem_pool_context(self) -> Any:
        return object()
