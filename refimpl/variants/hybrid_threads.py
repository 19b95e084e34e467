# SPDX-License-Identifier: Apache-2.0
"""A connector for several KV cache groups that saves on threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from kvconform.refimpl.plan import Save
from kvconform.refimpl.variants.hybrid import HybridConnector
from kvconform.refimpl.variants.threads import SavingThreads


class HybridThreads(SavingThreads, HybridConnector):
    """Waits before each step for the saves of the one before it.

    Blocks leave a window, and states move on, without notice to the connector.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = replace(self.options, async_saves=True)

    def _write(self, epoch: int, save: Save, sound: bool) -> None:
        if not sound:
            return
        for name, layer in self._layers.items():
            self._save_layer(epoch, save, name, layer)
        for piece in save.pieces:
            self._store.commit(epoch, piece.key)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        super().handle_preemptions(kv_connector_metadata)
        for _, future in self._saves:
            future.result()
