# SPDX-License-Identifier: Apache-2.0
"""Planted defects: the cache behind a connector, its levels, bounds and holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from kvconform.refimpl.cache.chunks import ChunkStore
from kvconform.refimpl.cache.holds import Holds
from kvconform.refimpl.cache.seal import packed, seal, unpacked, unseal
from kvconform.refimpl.cache.tiers import Tiers
from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector
from kvconform.refimpl.inspector import Inspector
from kvconform.refimpl.plan import Load, ReferenceMetadata, Save
from kvconform.refimpl.tracking import Tracked
from kvconform.refimpl.variants.tiers import CacheInspector, Tiered

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class FillsUp(ReferenceConnector):
    """Has room for twenty chunks, and never replaces one: it stops storing when they are taken."""

    _taken = 0

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        save = super()._plan_save(tracked, end, scheduled, final)
        if self._taken + len(save.pieces) > 20:
            return replace(save, pieces=())
        self._taken += len(save.pieces)
        return save


class HoldsWhatIsNotChosen(ReferenceConnector):
    """Holds what a lookup has found until its own load, which never comes if a sibling loads.

    It has room for twenty chunks, and stores nothing while all of them are held.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._found: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._found[request.request_id] = (tokens or 0) // self.options.chunk_tokens
        return tokens, is_async

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        self._found.pop(tracked.request.request_id, None)
        return super()._plan_load(tracked, granted, is_async)

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        save = super()._plan_save(tracked, end, scheduled, final)
        return replace(save, pieces=()) if sum(self._found.values()) >= 20 else save


# -- holds


class _EvictsHeld(Tiers):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._must_stay = lambda key: False


class EvictsPinned(Tiered):
    """Evicts the chunk that is next in the order, although a request was promised it (B110)."""

    tiers_kind = _EvictsHeld


class EvictsWhileReading(Tiered):
    """Holds what it has claimed until the load begins, and not until it has ended."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        for load in metadata.loads:
            super()._release_load(load)
        return metadata

    def _release_load(self, load: Load) -> None:
        return


class LeaksPins(Tiered):
    """Releases a claim when its request is admitted, which may never happen (B058)."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._admitted: set[str] = set()

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._admitted.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        waiting = {req: keys for req, keys in self._claimed.items() if req not in self._admitted}
        self._claimed = {req: self._claimed[req] for req in self._claimed if req not in waiting}
        metadata = super().build_connector_meta(scheduler_output)
        self._claimed |= waiting
        self._admitted.clear()
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        self._claimed.pop(request.request_id, None)
        return super().request_finished(request, block_ids)


class _OneForAll(Holds):
    """Knows which chunks are held, and not how often."""

    def release(self, chunks: Iterable[str]) -> None:
        for chunk in chunks:
            self._counts.pop(chunk, None)


class SharesPins(Tiered):
    """Releases a chunk for all when one request is done with it (B147)."""

    holds_kind = _OneForAll


# -- levels


class _Grows(Tiers):
    def _make_room(self, number: int, key: str) -> bool:
        return True

    def _trim(self) -> None:
        return


class NeverEvicts(Tiered):
    """Has bounds in its options, and does not look at them."""

    tiers_kind = _Grows


class BoundInBytes(CacheInspector):
    """Tells the bound of the first level in bytes: those of as many entries as it may have."""

    def cache(self) -> dict[str, Any]:
        state = super().cache()
        top = state["levels"][0]
        size = self._bytes(self._connector._cache.tiers.levels[0])
        bound = top["bound"] * size // max(top["entries"], 1)
        top |= {"bound": None, "bytes": size, "bytes_bound": bound, "full": size >= bound > 0}
        return state


class GrowsInBytes(NeverEvicts):
    """Has a bound in bytes, and does not look at it."""

    def kvconform_inspector(self) -> Inspector:
        return BoundInBytes(self)


class _PromotesFreely(Tiers):
    def _promote(self, key: str, value: bytes) -> None:
        self.levels[0].set(key, value)

    def _trim(self) -> None:
        return


class GrowsOnPromotion(Tiered):
    """Evicts when it stores, and not when it promotes."""

    tiers_kind = _PromotesFreely


class _TopOnly(Tiers):
    def exists(self, key: str) -> bool:
        return self.levels[0].exists(key)


class LooksAtTheTop(Tiered):
    """Looks up the first level only; what was moved to lower ones is never found."""

    tiers_kind = _TopOnly


class _Forgets(Tiers):
    def _demote(self, number: int, key: str) -> None:
        return


class LosesOnDemotion(Tiered):
    """Evicts from the first level, and does not store in the next one."""

    tiers_kind = _Forgets


class _Reads(Tiers):
    def _promote(self, key: str, value: bytes) -> None:
        return


class NeverPromotes(Tiered):
    """Reads from lower levels again and again."""

    tiers_kind = _Reads


class _Halves(Tiers):
    """Seals what it has copied so far as if it were all."""

    def _promote(self, key: str, value: bytes) -> None:
        layers = unpacked(unseal(key, value) or b"")
        half = dict(list(layers.items())[: len(layers) // 2])
        super()._promote(key, seal(key, packed(half)))


class PromotesHalf(Tiered):
    """Copies half of a chunk's layers to the first level, and finds the chunk there."""

    tiers_kind = _Halves


class _Trusting(ChunkStore):
    """Takes what is stored for what was stored, and fills up what is missing."""

    lengths: ClassVar[dict[str, int]] = {}

    def commit(self, epoch: int, key: str) -> None:
        super().commit(epoch, key)
        name = self._name(epoch, key, self._rank)
        self.lengths[name] = len(self.backend.get(name) or b"")

    def _opened(self, name: str, stored: bytes | None) -> dict[str, bytes]:
        if stored is None:
            return {}
        whole = stored.ljust(self.lengths.get(name, 0), b"\0")
        start = len(seal(name, b""))
        return unpacked(whole[start:])


class ServesTornWrites(Tiered):
    """Does not verify what a level returns: a half-written value is served as a whole one."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        durable = self._cache.tiers.levels[-1].backend
        self._store = _Trusting(self._cache.tiers, parallel.rank, self._world, durable)
        self._faults._store = self._store
