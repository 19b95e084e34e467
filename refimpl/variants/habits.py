# SPDX-License-Identifier: Apache-2.0
"""Connectors that are written in a way of their own and do nothing else."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import ReferenceConnector

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class KeepsLast(ReferenceConnector):
    """Remembers the request that ended last, for its metrics: one object, however many requests there are."""

    last: Request | None = None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.last = request
        return super().request_finished(request, block_ids)


class InstanceHooks(ReferenceConnector):
    """Chooses some of its hooks when it is made, and sets them on the instance."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        chosen: dict[str, Any] = {name: partial(getattr(ReferenceConnector, name), self) for name in ("request_finished", "get_finished")}
        self.__dict__.update(chosen)
