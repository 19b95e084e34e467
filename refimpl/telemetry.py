# SPDX-License-Identifier: Apache-2.0
"""What a connector tells others about itself: KV events, statistics, metrics, handshake metadata. None of it moves KV.

A chunk is announced once it can be loaded, not when it is planned, and withdrawn when a lookup finds it gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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

from kvconform.refimpl.paging import Share

if TYPE_CHECKING:
    from kvconform.refimpl.options import Options
    from kvconform.refimpl.plan import Piece
    from kvconform.refimpl.store import Store
    from kvconform.refimpl.tracking import Tracked

MEDIUM = "STORAGE"


@dataclass
class ReferenceStats(KVConnectorStats):
    """Counts of one interval, by name."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return ReferenceStats(
            {
                name: self.data.get(name, 0) + other.data.get(name, 0)
                for name in {**self.data, **other.data}
            }
        )

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class ReferenceMetrics(KVConnectorPromMetrics):
    """One counter per statistic, made when it is first seen."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name not in self._counters:
                self._counters[name] = self._counter_cls(
                    f"kvconform_{name}", f"{name} so far", self._labelnames
                )
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(count)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters: dict[str, Counter] = {}


@dataclass
class ReferenceHandshake(KVConnectorHandshakeMetadata):
    """Where a peer finds this rank's shards."""

    store: str


@dataclass
class _Chunk:
    """A chunk that is stored or about to be, as an event describes it."""

    hashes: list[Any]
    parent: Any
    tokens: list[int]
    lora: Any

    def stored(self) -> BlockStored:
        """The event; older releases know an adapter by its number only."""
        name = (
            {"lora_name": self.lora and self.lora.lora_name}
            if "lora_name" in BlockStored.__struct_fields__
            else {}
        )
        number = self.lora and self.lora.lora_int_id
        return BlockStored(
            block_hashes=self.hashes,
            parent_block_hash=self.parent,
            token_ids=self.tokens,
            block_size=len(self.tokens),
            lora_id=number,
            medium=MEDIUM,
            **name,
        )


class Telemetry(KVConnectorBase_V1):
    """The reference connector's part that only talks. Chunks that are no whole number of hashed blocks are not announced."""

    options: Options
    _store: Store

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._planned: dict[str, _Chunk] = {}
        self._announced: dict[str, _Chunk] = {}
        self._events: list[KVCacheEvent] = []
        self._events_epoch = 0
        self._counts: dict[str, int] = {}
        self._peers: dict[tuple[int, int], KVConnectorHandshakeMetadata] = {}

    def _expect(self, tracked: Tracked, pieces: Sequence[Piece]) -> bool:
        """Scheduler half: these chunks are going to be stored. Whether there are any."""
        request, chunk = tracked.request, self.options.chunk_tokens
        size = Share.of(self._vllm_config).block_size
        self._notice_reset()
        if pieces and chunk % size == 0:
            numbers = {key: index for index, key in enumerate(tracked.keys)}
            for piece in pieces:
                start = numbers[piece.key] * chunk
                if len(request.block_hashes) * size < start + chunk:
                    break  # the engine hashes blocks only where somebody wants hashes
                ends = [
                    maybe_convert_block_hash(request.block_hashes[at // size - 1])
                    for at in (start, start + chunk)
                    if at
                ]
                tokens = list(request.all_token_ids[start : start + chunk])
                self._planned[piece.key] = _Chunk(
                    ends[-1:], ends[0] if start else None, tokens, request.lora_request
                )
        return bool(pieces)

    def _notice_reset(self) -> None:
        """Scheduler half: forget what was planned and announced before the store was emptied."""
        if self._store.epoch() != self._events_epoch:
            self._events_epoch = self._store.epoch()
            self._planned.clear()
            self._announced.clear()
            self._events.append(AllBlocksCleared())

    def _withdraw(self, keys: Iterable[str]) -> None:
        """Scheduler half: a lookup found the first of these chunks gone; those that were announced are taken back if gone, too."""
        for key in keys:
            if key in self._announced and not self._store.has(key):
                self._events.append(
                    BlockRemoved(block_hashes=self._announced.pop(key).hashes, medium=MEDIUM)
                )
                self._count("chunks_removed")

    def take_events(self) -> Iterable[KVCacheEvent]:
        self._notice_reset()
        for key in [key for key in self._planned if self._store.has(key)]:
            chunk = self._announced[key] = self._planned.pop(key)
            self._events.append(chunk.stored())
            self._count("chunks_stored")
            chunk.tokens = []
        taken, self._events = self._events, []
        return taken

    def _count(self, name: str, by: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + by

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Of either half; a new object each time, for the engine adds others to it."""
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
        for name, moves in (
            ("chunks_read", connector_metadata.loads),
            ("chunks_written", connector_metadata.saves),
        ):
            pieces = sum(len(move.pieces) for move in moves)
            if pieces:
                self._count(name, pieces)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return (
            ReferenceHandshake(self.options.store) if self.role == KVConnectorRole.WORKER else None
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """After the start, and again after a sleep; empty where the workers have nothing to say."""
        self._peers = dict(metadata)
