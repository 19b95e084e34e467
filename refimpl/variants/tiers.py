# SPDX-License-Identifier: Apache-2.0
"""A connector over two bounded tiers, host memory and disk (systems.md C2, C3, B14).

Hits are promoted to the host. Chunks evicted from the host go to the disk; chunks evicted from the
disk are lost. The chunks that a lookup has found are pinned until the step that loads them is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector
from kvconform.refimpl.store import MemoryStore, open_store

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

HOST_CHUNKS = 4
DISK_CHUNKS = 96


@dataclass
class Books:
    """The state of the tiers, shared by both halves.

    `host` and `disk`: keys in the order of their last use. `uses`: how often each was used. `pins`:
    pinned keys by request.
    """

    host: dict[str, None] = field(default_factory=dict)
    disk: dict[str, None] = field(default_factory=dict)
    uses: Counter[str] = field(default_factory=Counter)
    pins: dict[str, set[str]] = field(default_factory=dict)


class Tiers:
    """A `store.Store` with two tiers.

    `lfu`: evict the least frequently used chunk; otherwise the least recently used.
    """

    _books: ClassVar[dict[str, Books]] = {}
    _pins: ClassVar[dict[str, dict[str, set[str]]]] = {}

    def __init__(self, where: str, lfu: bool, rank: int, world: int) -> None:
        self._host = MemoryStore(f"host of {where}", rank, world)
        self._disk = open_store(where, rank, world)
        # Each rank has its own state, with common pins. All ranks move the same chunks.
        pins = self._pins.setdefault(where, {})
        self.books = self._books.setdefault(f"{rank} of {where}", Books(pins=pins))
        self._lfu = lfu
        self._layers: dict[str, set[str]] = {}

    def epoch(self) -> int:
        return self._disk.epoch()

    def reset(self) -> None:
        self._host.reset()
        self._disk.reset()
        self.books.host.clear()
        self.books.disk.clear()

    def put(self, epoch: int, key: str, layer: str, data: bytes) -> None:
        if epoch == self.epoch():
            self._layers.setdefault(key, set()).add(layer)
            self._host.put(self._host.epoch(), key, layer, data)

    def commit(self, epoch: int, key: str) -> None:
        if epoch == self.epoch():
            self._host.commit(self._host.epoch(), key)
            self._use(key, self.books.host)
            self._shrink()

    def has(self, key: str) -> bool:
        return self._host.has(key) or self._disk.has(key)

    def get(self, key: str, layer: str) -> bytes | None:
        """Return one layer of this rank's shard; counts as a use.

        A chunk on the disk is copied to the host when its first layer is read.
        """
        if not self._host.has(key) and self._disk.has(key):
            for each in self._layers.get(key, ()):
                data = self._disk.get(key, each)
                if data is not None:
                    self._host.put(self._host.epoch(), key, each, data)
            self._host.commit(self._host.epoch(), key)
            self._use(key, self.books.host)
            self._shrink(keep=key)
        self._use(key, self.books.host)
        return self._host.get(key, layer)

    def drop(self, key: str) -> None:
        self._host.drop(key)
        self._disk.drop(key)
        self.books.host.pop(key, None)
        self.books.disk.pop(key, None)

    def keys(self) -> Iterator[str]:
        return iter(sorted({*self._host.keys(), *self._disk.keys()}))

    def _use(self, key: str, tier: dict[str, None]) -> None:
        tier.pop(key, None)
        tier[key] = None
        self.books.uses[key] += 1

    def _shrink(self, keep: str = "") -> None:
        """Evict until both tiers are within their bounds, or all their chunks are pinned."""
        pinned = {keep}.union(*self.books.pins.values())
        for tier, bound in ((self.books.host, HOST_CHUNKS), (self.books.disk, DISK_CHUNKS)):
            victims = [key for key in tier if key not in pinned]  # least recently used first
            if self._lfu:
                victims.sort(key=lambda key: self.books.uses[key])
            for key in victims[: max(0, len(tier) - bound)]:
                del tier[key]
                if tier is self.books.host:
                    self._demote(key)
                else:
                    self._disk.drop(key)

    def _demote(self, key: str) -> None:
        if not self._disk.has(key):
            for layer in self._layers.get(key, ()):
                data = self._host.get(key, layer)
                if data is not None:
                    self._disk.put(self._disk.epoch(), key, layer, data)
            self._disk.commit(self._disk.epoch(), key)
        self._use(key, self.books.disk)
        self._host.drop(key)


class Tiered(ReferenceConnector):
    """The reference connector over two tiers.

    It declares no capabilities: how long it keeps a chunk depends on the other chunks.
    """

    kvconform_capabilities = None  # type: ignore[assignment]
    lfu = False

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._tiers = Tiers(self.options.store, self.lfu, parallel.rank, parallel.world_size)
        self._store = self._tiers
        self._faults._store = self._tiers

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        pins: set[str] = set()
        if tokens:
            found = (tokens + num_computed_tokens) // self.options.chunk_tokens
            pins.update(self._keys(request, [], request.num_tokens)[:found])
        self._tiers.books.pins[request.request_id] = pins
        return tokens, is_async

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        # Unpin the chunks of requests that were not admitted or are finished.
        pins = self._tiers.books.pins
        for req_id in list(pins):
            if req_id not in scheduler_output.num_scheduled_tokens and req_id not in self._loading:
                del pins[req_id]
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        pins = self._tiers.books.pins
        for req_id in list(pins):
            if req_id not in self._loading:
                del pins[req_id]

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        self._tiers.books.pins.pop(request.request_id, None)
        return super().request_finished(request, block_ids)


class TieredLfu(Tiered):
    """Evicts the least frequently used chunk."""

    lfu = True
