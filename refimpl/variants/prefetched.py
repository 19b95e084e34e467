# SPDX-License-Identifier: Apache-2.0
"""A connector that prefetches (systems.md C4; `refimpl/cache/prefetch.py`).

A lookup starts to fetch what the store has of a request, and answers None until it is in memory.
Both halves share the memory, so they must be in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvconform.refimpl.cache.chunks import VALUES, ChunkStore
from kvconform.refimpl.cache.prefetch import Prefetching
from kvconform.refimpl.cache.urls import open_backend
from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector
from kvconform.refimpl.inspector import Inspector
from kvconform.refimpl.options import Options

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass(frozen=True)
class PrefetchOptions(Options):
    """The options of a connector with prefetch."""

    batch: int = 2
    """Chunks that are fetched, or moved, at a time."""
    prefetch: int = 64
    """How many chunks the memory for prefetched ones may hold."""


class Prefetched(ReferenceConnector):
    """The reference connector with prefetch.

    Its additional options are those of `PrefetchOptions`.
    """

    options: PrefetchOptions
    options_kind = PrefetchOptions
    memory_kind: ClassVar[type[Prefetching]] = Prefetching
    memories: ClassVar[dict[tuple[str, str], Prefetching]] = {}
    """Memory of the halves and ranks of one engine, by engine id and store."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._world = parallel.world_size
        self._place = (str(self._kv_transfer_config.engine_id), self.options.store)
        if self._place not in self.memories:
            self.memories[self._place] = self._new_memory()
        self._memory = self.memories[self._place]
        self._use(ChunkStore(self._memory, parallel.rank, self._world))

    def _new_memory(self) -> Prefetching:
        return self.memory_kind(
            open_backend(self.options.store, self.options.patience),
            self.options.prefetch * self._world,
            self.options.batch,
        )

    # -- Scheduler half

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        """Answer None until what the store has is in memory."""
        if self._may_load and not self._is_fetched(request, num_computed_tokens):
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _is_fetched(self, request: Request, local: int) -> bool:
        """Start to fetch the chunks behind the local hit; return whether all are in memory."""
        keys = self._keys(request, [], request.num_tokens)
        stored = list(takewhile(self._store.has, keys))
        names = [
            name
            for key in stored[local // self.options.chunk_tokens :]
            for name in self._names(key)
        ]
        return self._memory.prefetch(request.request_id, names)

    def _names(self, key: str) -> Sequence[str]:
        return self._store.names(key)

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        """Release what was fetched: a load that is under way reads the store instead."""
        self._memory.release(request.request_id)
        return super().request_finished(request, block_ids)

    def shutdown(self) -> None:
        self._memory.close()
        self.memories.pop(self._place, None)
        super().shutdown()

    # -- Suite

    def kvconform_inspector(self) -> Inspector:
        return PrefetchInspector(self)


class PrefetchInspector(Inspector):
    """Shows the suite the memory, too."""

    def __init__(self, connector: Prefetched) -> None:
        self._connector = connector

    def cache(self) -> dict[str, Any]:
        """Return the number of prefetched values as holds, and the store as the only level."""
        stored = sum(1 for _ in self._connector._memory.list(VALUES))
        level = {"name": "store", "entries": stored, "bound": None, "held": 0}
        return {"held": len(self._connector._memory), "levels": [level]}

    def cached(self, request: Request) -> list[int]:
        """Return how many of a request's first tokens the store has."""
        connector = self._connector
        keys = connector._keys(request, [], request.num_tokens)
        stored = list(takewhile(connector._store.has, keys))
        return [len(stored) * connector.options.chunk_tokens]
