# SPDX-License-Identifier: Apache-2.0
"""Reports of the reference connector: KV events, statistics, metrics and handshake metadata.

A chunk is announced when it can be loaded, not when its save is planned. It is withdrawn when a
lookup finds it gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import Counter
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvconform.compat.block_keys import extra_keys_of
from kvconform.refimpl.paging import Share

if TYPE_CHECKING:
    from kvconform.refimpl.cache.chunks import ChunkStore
    from kvconform.refimpl.options import Options
    from kvconform.refimpl.plan import Piece
    from kvconform.refimpl.tracking import Tracked

COUNTERS = {name: [name, f"kvconform_{name}"] for name in ("bytes_loaded", "tokens_granted")}
"""Names of counters in the log and among the metrics, by their meaning for the suite."""


@dataclass
class ReferenceStats(KVConnectorStats):
    """Counts of one interval, by name."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        names = {**self.data, **other.data}
        return ReferenceStats(
            {name: self.data.get(name, 0) + other.data.get(name, 0) for name in names}
        )

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class ReferenceMetrics(KVConnectorPromMetrics):
    """One counter per statistic, created when the statistic is first seen."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters: dict[str, Counter] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name not in self._counters:
                self._counters[name] = self._counter_cls(
                    f"kvconform_{name}", f"{name} so far", self._labelnames
                )
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(count)


@dataclass
class ReferenceHandshake(KVConnectorHandshakeMetadata):
    """The store in which a peer finds this rank's shards."""

    store: str


@dataclass
class _Chunk:
    """The event data of a chunk that is stored or about to be stored."""

    hashes: list[Any]
    parent: Any
    tokens: list[int]
    lora: Any
    extra_keys: tuple[Any, ...] | None

    def stored(self, medium: str) -> BlockStored:
        """Return the event that announces the chunk."""
        # Older releases identify an adapter only by its number, and give no extra keys.
        extra = [self.extra_keys] if self.extra_keys else None
        late = {"lora_name": self.lora and self.lora.lora_name, "extra_keys": extra}
        known = {key: late[key] for key in late if key in BlockStored.__struct_fields__}
        number = self.lora and self.lora.lora_int_id
        return BlockStored(
            block_hashes=self.hashes,
            parent_block_hash=self.parent,
            token_ids=self.tokens,
            block_size=len(self.tokens),
            lora_id=number,
            medium=medium,
            **known,
        )


class Telemetry(KVConnectorBase_V1):
    """The reporting part of the reference connector.

    Chunks that are not a whole number of hashed blocks are not announced.
    """

    options: Options
    medium: ClassVar[str] = "STORAGE"
    """Where its events say that chunks are."""
    _store: ChunkStore

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._planned: dict[str, _Chunk] = {}
        self._announced: dict[str, _Chunk] = {}
        self._events: list[KVCacheEvent] = []
        self._events_epoch = 0
        self._counts: dict[str, float] = {}
        self._peers: dict[tuple[int, int], KVConnectorHandshakeMetadata] = {}

    def _expect(self, tracked: Tracked, pieces: Sequence[Piece]) -> bool:
        """Remember chunks that will be stored; return whether there are any. Scheduler half."""
        request = tracked.request
        chunk = self.options.chunk_tokens
        size = Share.of(self._vllm_config).block_size
        self._notice_reset()
        if pieces and chunk % size == 0:
            numbers = {key: index for index, key in enumerate(tracked.keys)}
            extra_keys = extra_keys_of(request)
            for piece in pieces:
                start = numbers[piece.key] * chunk
                end = start + chunk
                if len(request.block_hashes) * size < end:
                    break  # the engine hashes blocks only if a component needs the hashes
                # The hash of a chunk is the hash of its last block.
                last = maybe_convert_block_hash(request.block_hashes[end // size - 1])
                parent = None
                if start:
                    parent = maybe_convert_block_hash(request.block_hashes[start // size - 1])
                tokens = list(request.all_token_ids[start:end])
                self._planned[piece.key] = _Chunk(
                    [last], parent, tokens, request.lora_request, extra_keys(start, end)
                )
        return bool(pieces)

    def _notice_reset(self) -> None:
        """Forget what was planned and announced before the store was emptied. Scheduler half."""
        if self._store.epoch() != self._events_epoch:
            self._events_epoch = self._store.epoch()
            self._planned.clear()
            self._announced.clear()
            self._events.append(AllBlocksCleared())

    def _withdraw(self, keys: Iterable[str]) -> None:
        """Withdraw the announced chunks among these that are gone. Scheduler half.

        Called when a lookup has found the first of them gone.
        """
        for key in keys:
            if key in self._announced and not self._store.has(key):
                chunk = self._announced.pop(key)
                self._events.append(BlockRemoved(block_hashes=chunk.hashes, medium=self.medium))
                self._count("chunks_removed")

    def take_events(self) -> Iterable[KVCacheEvent]:
        self._notice_reset()
        for key in [key for key in self._planned if self._store.has(key)]:
            chunk = self._planned.pop(key)
            self._announced[key] = chunk
            self._events.append(chunk.stored(self.medium))
            self._count("chunks_stored")
            chunk.tokens = []  # not needed to withdraw it
        taken, self._events = self._events, []
        return taken

    def _count(self, name: str, by: float = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + by

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the counts since the last call, of either half.

        A new object each time: the engine aggregates others into it.
        """
        counts, self._counts = self._counts, {}
        return ReferenceStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return ReferenceStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        return ReferenceMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        read = sum(len(load.pieces) for load in connector_metadata.loads)
        if read:
            self._count("chunks_read", read)
        written = sum(len(save.pieces) for save in connector_metadata.saves)
        if written:
            self._count("chunks_written", written)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self.role != KVConnectorRole.WORKER:
            return None
        return ReferenceHandshake(self.options.store)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take note of the workers' handshake metadata.

        Called after the start, and again after a sleep; empty if the workers have none.
        """
        self._peers = dict(metadata)
