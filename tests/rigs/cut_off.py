# SPDX-License-Identifier: Apache-2.0
"""A correct connector one of whose engines cannot reach the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvconform.refimpl.cache.chunks import open_store
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.options import Options


@dataclass(frozen=True)
class CutOffOptions(Options):
    """The options; `elsewhere` is where the engine `cut_off` (its name) looks for the store."""

    elsewhere: str = ""
    cut_off: str = ""


class CutOff(ReferenceConnector):
    """The reference connector. The engine `cut_off` calls another server."""

    options: CutOffOptions
    options_kind = CutOffOptions

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine = str(self._kv_transfer_config.engine_id)
        if self.options.cut_off and engine.endswith(self.options.cut_off):
            self._use(open_store(self.options.elsewhere, patience=self.options.patience))
