# SPDX-License-Identifier: Apache-2.0
"""Connectors that load and save less than they could; the engine computes the rest.

They declare no capabilities: the suite infers them from what they do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvconform.refimpl.cache.chunks import ChunkStore
from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector
from kvconform.refimpl.plan import ReferenceMetadata, Save

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

WORTH_LOADING = 24
"""Tokens."""
LOADS_PER_STEP = 1
SAVES_PER_STEP = 2
"""Chunks."""
LIFETIME = 10
"""Steps."""


class Undeclared(ReferenceConnector):
    """The reference connector, without declared capabilities."""

    kvconform_capabilities = None  # type: ignore[assignment]


class WorthLoading(Undeclared):
    """Loads at least 24 tokens beyond the local hit, or none (LMCache: min_retrieve_tokens)."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is None or tokens < WORTH_LOADING:
            return 0, False
        return tokens, is_async


class OneLoadPerStep(Undeclared):
    """Loads for one request per step; the others compute, unless they were told of a hit before."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        told = self._told()
        if len(self._granted) >= LOADS_PER_STEP and request.request_id not in told:
            return 0, False
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0]:
            told.add(request.request_id)
        return found

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._told().discard(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        self._told().discard(request.request_id)
        return super().request_finished(request, block_ids)

    def _told(self) -> set[str]:
        """Return the requests that were told of a hit, and got no blocks yet."""
        return self.__dict__.setdefault("_told_of_hits", set())


class SaveBudget(Undeclared):
    """Saves the first two chunks of each step; the others are never saved."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        left = SAVES_PER_STEP
        saves: list[Save] = []
        for save in metadata.saves:
            if not save.final:
                save = replace(save, pieces=save.pieces[:left])
                left -= len(save.pieces)
            saves.append(save)
        return replace(metadata, saves=tuple(saves))


class Expiring(Undeclared):
    """Finds a chunk for ten steps after its save or latest hit; then it must be saved again."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._store: Any = self._store if role.name == "WORKER" else Clocked(self._store)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        self._store.tick(piece.key for save in metadata.saves for piece in save.pieces)
        return metadata


class Clocked:
    """A view of a store in which chunks expire; `_now` counts steps.

    An expired chunk is not removed: a load of it may be under way.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._now = 0
        self._since: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def has(self, key: str) -> bool:
        """Return whether the chunk is stored and has not expired."""
        if not self._store.has(key):
            return False
        since = self._since.get(key, self._now)
        if self._now - since >= LIFETIME:
            return False
        self._since[key] = self._now  # a lookup that is repeated in the next step finds it again
        return True

    def tick(self, saved: Iterable[str]) -> None:
        """Count a step; the lifetime of the `saved` chunks starts again."""
        self._now += 1
        self._since |= dict.fromkeys(saved, self._now)
