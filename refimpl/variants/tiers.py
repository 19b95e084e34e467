# SPDX-License-Identifier: Apache-2.0
"""Host memory over a disk, both bounded (systems.md C2, C3, B14): hits are promoted, what is evicted from the host goes to the disk, what
is evicted there is gone. What a lookup has found is pinned until the step that was planned with it is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.store import MemoryStore, open_store

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

HOST_CHUNKS = 4
DISK_CHUNKS = 96


@dataclass
class Books:
    """What both halves know of the tiers: keys in the order of their last use, how often each was used, and pins by request."""

    host: dict[str, None] = field(default_factory=dict)
    disk: dict[str, None] = field(default_factory=dict)
    uses: Counter[str] = field(default_factory=Counter)
    pins: dict[str, set[str]] = field(default_factory=dict)


class Tiers:
    """A `store.Store` of two tiers. `lfu`: evict what was used least often, else what was not used for longest."""

    _books: ClassVar[dict[str, Books]] = {}
    _pins: ClassVar[dict[str, dict[str, set[str]]]] = {}

    def __init__(self, where: str, lfu: bool, rank: int, world: int) -> None:
        self._host, self._disk = (
            MemoryStore(f"host of {where}", rank, world),
            open_store(where, rank, world),
        )
        self.books = self._books.setdefault(
            f"{rank} of {where}", Books(pins=self._pins.setdefault(where, {}))
        )  # the ranks do the same
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
        """Counts as a use. A chunk on the disk is copied to the host when its first layer is read."""
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
        """Evict until both tiers are within their bounds, or everything left is pinned."""
        pinned = {keep}.union(*self.books.pins.values())
        for tier, bound in ((self.books.host, HOST_CHUNKS), (self.books.disk, DISK_CHUNKS)):
            victims = [key for key in tier if key not in pinned]
            victims.sort(
                key=lambda key: self.books.uses[key] if self._lfu else 0
            )  # stable: the longest unused first
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
    """The reference connector over two tiers. It declares nothing: how much it keeps depends on what else there is to keep."""

    kvconform_capabilities = None  # type: ignore[assignment]
    lfu = False

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._store = self._tiers = Tiers(
            self.options.store, self.lfu, parallel.rank, parallel.world_size
        )
        self._faults._store = self._tiers

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        keys = self._keys(request, [], request.num_tokens)[
            : ((answer[0] or 0) + num_computed_tokens) // self.options.chunk_tokens
        ]
        self._tiers.books.pins[request.request_id] = set(keys) if answer[0] else set()
        return answer

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        for req_id in [
            req_id
            for req_id in self._tiers.books.pins
            if req_id not in scheduler_output.num_scheduled_tokens
        ]:
            if req_id not in self._loading:
                del self._tiers.books.pins[req_id]  # it was not admitted, or is over
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for req_id in [req_id for req_id in self._tiers.books.pins if req_id not in self._loading]:
            del self._tiers.books.pins[req_id]

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._tiers.books.pins.pop(request.request_id, None)
        return super().request_finished(request, block_ids)


class TieredLfu(Tiered):
    """Evicts what was used least often."""

    lfu = True
