# SPDX-License-Identifier: Apache-2.0
"""Planted defects of connectors that copy on threads, which show when the threads get no time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvconform.refimpl.variants.threads import Threads

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


class NeedsNoBlocks(Threads):
    """Keeps no blocks for what its threads are still to save of a request that has ended."""

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        _, params = super().request_finished(request, block_ids)
        return False, params

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        _, received = super().get_finished(finished_req_ids)
        return None, received


class ReportsWhatIsQueued(Threads):
    """Reports that a request is saved when its last save is queued, and not when it is done."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        queued = {save.req for save, _ in self._saves if save.final}
        self._saves = [(save, future) for save, future in self._saves if not save.final]
        return (sent or set()) | queued or None, received


class OverwritesWhatIsQueued(Threads):
    """Does not wait for its threads before the blocks of a preempted request are overwritten."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        super(Threads, self).handle_preemptions(kv_connector_metadata)


class ReportsLoadsThatBegan(Threads):
    """Reports a load when a thread has begun with it."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        begun = {load.req for load, _ in self._loads}
        sent, received = super().get_finished(finished_req_ids)
        self._loads = []
        return sent, (received or set()) | begun or None
