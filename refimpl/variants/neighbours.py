# SPDX-License-Identifier: Apache-2.0
"""A connector whose engines find each other's KV by its content (systems.md C5).

No request carries parameters: a lookup asks the other engines, over sockets (`refimpl/cache/`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvconform.refimpl.cache.chunks import ChunkStore
from kvconform.refimpl.cache.memory import MemoryBackend
from kvconform.refimpl.cache.peers import Neighbours, Served
from kvconform.refimpl.cache.urls import open_backend
from kvconform.refimpl.connector import ReferenceConnector

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class PeerToPeer(ReferenceConnector):
    """The reference connector with a store in the memory of each engine.

    `store` is where the engines announce themselves. Both halves must be in one process.
    """

    backend_kind: ClassVar[type[Neighbours]] = Neighbours

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine = str(self._kv_transfer_config.engine_id)
        parallel = vllm_config.parallel_config
        self._meeting = open_backend(self.options.store, self.options.patience)
        self._name = f"engine {engine}"
        own = MemoryBackend(self._name)
        backend = self.backend_kind(own, engine, self._meeting, self.options.patience)
        self._use(ChunkStore(backend, parallel.rank, parallel.world_size, self._meeting))
        is_scheduler = role == KVConnectorRole.SCHEDULER
        self._served = Served(own, engine, self._meeting) if is_scheduler else None

    def shutdown(self) -> None:
        if self._served is not None:
            self._served.close()
        self._store.close()
        self._meeting.close()
        MemoryBackend.named.pop(self._name, None)
        super().shutdown()
