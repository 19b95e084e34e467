# SPDX-License-Identifier: Apache-2.0
"""Planted defects: what is wrong once a session was cut back and extended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvconform.refimpl.connector import Finish, ReferenceConnector

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvconform.refimpl.tracking import Tracked


class KeepsKeys(ReferenceConnector):
    """Computes the keys of a request as soon as its tokens are known, until it finishes.

    The last sampled token of a session is dropped when it gets more input; the key of the chunk
    that it completed stays.
    """

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        kept: dict[str, list[str]] = self.__dict__.setdefault("_kept", {})
        self._tracked[request.request_id].keys = kept.setdefault(request.request_id, [])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        for tracked in self._tracked.values():
            self._keys(tracked.request, tracked.keys, tracked.request.num_tokens)

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        result = super().request_finished(request, block_ids)
        self.__dict__.get("_kept", {}).pop(request.request_id, None)
        return result


class AppendsToSessions(ReferenceConnector):
    """Adds the blocks of a session that goes on to those that it had, although vLLM names all."""

    def _extend_table(
        self, tracked: Tracked, new_blocks: Sequence[Sequence[int]] | None, replaces: bool
    ) -> None:
        tables: dict[str, list[int]] = self.__dict__.setdefault("_tables", {})
        super()._extend_table(tracked, new_blocks, replaces)
        request = tracked.request
        if replaces and request.resumable:
            tracked.table = [*tables.get(request.request_id, ()), *tracked.table]
        tables[request.request_id] = list(tracked.table)
