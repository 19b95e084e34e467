# SPDX-License-Identifier: Apache-2.0
"""A connector whose store is a server (`served_store`).

Without the server, lookups find nothing, saves are lost, and granted loads are reported as failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.faults import Faults
from kvconform.refimpl.variants.served_store import ServedStore

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Served(ReferenceConnector):
    """The reference connector over a `ServedStore`; the option `store` is `served:PORT`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        port = int(self.options.store.partition(":")[2])
        self._store: ServedStore = ServedStore(port, parallel.rank, parallel.world_size)
        self._faults = Faults(self._store)
