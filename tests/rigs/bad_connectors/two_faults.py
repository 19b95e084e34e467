# SPDX-License-Identifier: Apache-2.0
"""A connector whose hook raises, and that stores one chunk in place of another."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.paging import read_slots


class Connector(ReferenceConnector):
    """Raises for an aborted request. Stores a request's first chunk as its second, in one layer."""

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        if request.status == RequestStatus.FINISHED_ABORTED:
            self._forget()
        return super().request_finished(request, block_ids)

    def _forget(self) -> None:
        raise LookupError("the store has forgotten it")

    def _save_layer(self, epoch: int, save: Any, layer: str, kv_layer: Any) -> None:
        super()._save_layer(epoch, save, layer, kv_layer)
        if len(save.pieces) > 1 and layer == min(self._layers):
            first, second, *_ = save.pieces
            data = read_slots(kv_layer, first.slots, self._share)
            self._store.put(epoch, second.key, layer, data)
