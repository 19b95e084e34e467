# SPDX-License-Identifier: Apache-2.0
"""A connector over tiers with bounds (systems.md B14, C2, C3; `refimpl/cache/`).

What a lookup has claimed is held until the end of the engine's scheduling, and what a step is to
load until the worker half has read it: eviction does not take it. Both halves share the levels, so
they must be in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvconform.refimpl.cache.arena import PinnedBackend
from kvconform.refimpl.cache.chunks import VALUES, ChunkStore, chunk_of
from kvconform.refimpl.cache.eviction import EVICTORS
from kvconform.refimpl.cache.file import FileBackend
from kvconform.refimpl.cache.holds import Holds
from kvconform.refimpl.cache.tiers import Level, Tiers
from kvconform.refimpl.cache.urls import open_backend
from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector
from kvconform.refimpl.inspector import Inspector
from kvconform.refimpl.options import Options
from kvconform.refimpl.plan import Load, ReferenceMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass(frozen=True)
class TierOptions(Options):
    """The options of a connector with tiers; `store` is the lowest level."""

    tiers: tuple[Mapping[str, Any], ...] = ({"url": "memory:", "chunks": 4},)
    """The levels above the store, the fastest first: `url`, and how many `chunks` it may hold."""
    store_chunks: int | None = None
    """How many chunks the store may hold. Default: any number."""
    evict: str = "lru"
    """Which chunk leaves a full level: the least recently used (`lru`), or frequently (`lfu`)."""

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Self:
        """See Options."""
        options = super().of(vllm_config)
        if options.evict not in EVICTORS:
            known = ", ".join(EVICTORS)
            raise ValueError(f"evict must be one of {known}, not {options.evict!r}")
        for level in options.tiers:
            if level.keys() != {"url", "chunks"}:
                raise ValueError(f"a tier has a url and chunks, not {sorted(level)}")
        return options


class Cache:
    """The levels and the holds of one store, which the halves and ranks of a process share."""

    opened: ClassVar[dict[str, Cache]] = {}

    def __init__(
        self, options: TierOptions, world: int, tiers: type[Tiers], holds: type[Holds]
    ) -> None:
        self.holds = holds()
        levels = [*options.tiers, {"url": options.store, "chunks": options.store_chunks}]
        self.tiers = tiers(
            [
                Level(
                    f"level {number}",
                    open_backend(level["url"], options.patience),
                    None if level["chunks"] is None else level["chunks"] * world,
                    EVICTORS[options.evict](),
                )
                for number, level in enumerate(levels)
            ],
            must_stay=lambda key: chunk_of(key) in self.holds,
            prefix=VALUES,
        )

    def counts(self) -> dict[str, int]:
        """Return what happened so far: misses, losses, and of each level hits, bytes and moves."""
        found = {"chunks_missed": self.tiers.misses, "chunks_lost": self.tiers.lost}
        for number, level in enumerate(self.tiers.levels):
            found |= {f"level{number}_{name}": count for name, count in vars(level.counts).items()}
        return found

    @classmethod
    def of(cls, options: TierOptions, world: int, tiers: type[Tiers], holds: type[Holds]) -> Cache:
        """Return the cache with these options, opening it the first time.

        Engines whose chunks differ share it: each would keep the bound of its own chunks only.
        """
        levels = options.tiers, options.store, options.store_chunks, options.evict, options.patience
        key = f"{tiers.__name__} {holds.__name__} {world} {levels}"
        if key not in cls.opened:
            cls.opened[key] = cls(options, world, tiers, holds)
        return cls.opened[key]


class Tiered(ReferenceConnector):
    """The reference connector over several levels, with holds on what it has promised.

    Its additional options are those of `TierOptions`.
    """

    options: TierOptions
    options_kind = TierOptions
    tiers_kind: ClassVar[type[Tiers]] = Tiers
    holds_kind: ClassVar[type[Holds]] = Holds

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._world = parallel.world_size
        self._cache = Cache.of(self.options, self._world, self.tiers_kind, self.holds_kind)
        tiers = self._cache.tiers
        durable = tiers.levels[-1].backend
        self._use(ChunkStore(tiers, parallel.rank, self._world, durable))
        # Scheduler half: the held chunks of requests that were looked up in this step.
        self._claimed: dict[str, list[str]] = {}
        # What the levels had counted when it was last reported.
        self._reported: dict[str, int] = self._cache.counts()

    # -- Scheduler half

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        """Hold the chunks before looking for them, so that none goes between look and claim."""
        keys = list(self._keys(request, [], request.num_tokens))
        self._release_claim(request.request_id)
        self._hold(request.request_id, keys)
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        end = num_computed_tokens + tokens if tokens else 0
        self._release_claim(request.request_id)
        self._hold(request.request_id, keys[: -(-end // self.options.chunk_tokens)])
        return tokens, is_async

    def _hold(self, req_id: str, keys: list[str]) -> None:
        self._cache.holds.take(keys)
        self._claimed[req_id] = keys

    def _release_claim(self, req_id: str) -> None:
        self._cache.holds.release(self._claimed.pop(req_id, ()))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Hold what the step loads, once per rank; release the claims.

        A request that was not admitted is looked up again in the next step.
        """
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        for load in metadata.loads:
            self._cache.holds.take(chunks_of(load), self._world)
        for req_id in list(self._claimed):
            self._release_claim(req_id)
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        self._release_claim(request.request_id)
        return super().request_finished(request, block_ids)

    # -- Worker half

    def wait_for_save(self) -> None:
        """Release what the step has loaded: all layers are read."""
        metadata = self._metadata()
        is_first_call = metadata is not self._saved
        super().wait_for_save()
        for load in metadata.loads if is_first_call else ():
            if not load.is_async:
                self._release_load(load)

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        super()._load(load, layers)
        if load.is_async:
            self._release_load(load)

    def _release_load(self, load: Load) -> None:
        self._cache.holds.release(chunks_of(load))

    def shutdown(self) -> None:
        for load in self._load_queue.take():
            self._release_load(load)
        for req_id in list(self._claimed):
            self._release_claim(req_id)
        self._cache.tiers.flush()
        super().shutdown()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Add what the levels have counted since the last call; one half reports it."""
        if self.role == KVConnectorRole.SCHEDULER:
            counts = self._cache.counts()
            for name, count in counts.items():
                if count > self._reported.get(name, 0):
                    self._count(name, count - self._reported.get(name, 0))
            self._reported = counts
        return super().get_kv_connector_stats()

    # -- Suite

    def kvconform_inspector(self) -> Inspector:
        return CacheInspector(self)

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        found = {**super().kvconform_capabilities(extra_config), "leases": True}
        if extra_config.get("store_chunks") is not None:
            # How long it keeps a chunk depends on the other chunks.
            found |= {"best_effort": True, "kv_events": False}
        return found


def chunks_of(load: Load) -> list[str]:
    """Return the chunks that a load reads."""
    return [piece.key for piece in load.pieces]


class CacheInspector(Inspector):
    """Shows the suite the levels, too."""

    def __init__(self, connector: Tiered) -> None:
        self._connector = connector

    def cache(self) -> dict[str, Any]:
        """Return how many holds there are (`held`), and of each level its state (`levels`).

        Of a level: `name`, `entries`, `bound` (None: none), `held` entries, and counts.
        """
        cache = self._connector._cache
        levels = []
        for level in cache.tiers.levels:
            keys = level.stored(VALUES)
            held = sum(chunk_of(key) in cache.holds for key in keys)
            levels.append(
                {"name": level.name, "entries": len(keys), "bound": level.bound, "held": held}
                | vars(level.counts)
            )
        return {"held": len(cache.holds), "levels": levels}

    def sizes(self) -> list[dict[str, Any]]:
        """Return of each level its `name`, the `bytes` of its values, and the `path` of its files.

        It reads all values, except of levels that know their size.
        """
        sizes = []
        for level in self._connector._cache.tiers.levels:
            size: dict[str, Any] = {"name": level.name, "bytes": self._bytes(level)}
            if isinstance(level.backend, FileBackend):
                size["path"] = level.backend.root
            sizes.append(size)
        return sizes

    def _bytes(self, level: Level) -> int:
        if isinstance(level.backend, PinnedBackend):
            return level.backend.used
        return sum(len(level.backend.get(key) or b"") for key in level.stored())

    def cached(self, request: Request) -> list[int]:
        """Return how many of a request's first tokens the levels have.

        Number i is about the first i + 1 levels together.
        """
        connector = self._connector
        keys = connector._keys(request, [], request.num_tokens)
        depths = [self._depth(key) for key in keys]
        found: list[int] = []
        for number in range(len(connector._cache.tiers.levels)):
            deeper = (index for index, depth in enumerate(depths) if depth > number)
            found.append(next(deeper, len(keys)) * connector.options.chunk_tokens)
        return found

    def _depth(self, key: str) -> int:
        """Return the number of the level down to which the shards of a chunk are spread.

        If one of them is in no level, it is the number of levels.
        """
        levels = self._connector._cache.tiers.levels
        return max(
            next((number for number, level in enumerate(levels) if level.exists(name)), len(levels))
            for name in self._connector._store.names(key)
        )
