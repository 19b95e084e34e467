# SPDX-License-Identifier: Apache-2.0
"""The hooks' life cycle: metadata, the end of requests, reset, shutdown."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.plan import Save

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class NoneMetadata(ReferenceConnector):
    """Returns no metadata in steps in which nothing is scheduled."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        return metadata if scheduler_output.total_num_scheduled_tokens else None  # type: ignore[return-value]


class ReusesMetadata(ReferenceConnector):
    """Fills one metadata object again and again, while the worker may still have the last one in hand."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        reused: KVConnectorMetadata = self.__dict__.setdefault("_reused", metadata)
        reused.__dict__.update(metadata.__dict__)
        return reused


class Unpicklable(ReferenceConnector):
    """Puts a lock into the metadata, which cannot travel to another process."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        metadata.__dict__["lock"] = threading.Lock()
        return metadata


class MutatesOutput(ReferenceConnector):
    """Consumes the finished requests out of the scheduler's output, so the worker never hears of them."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        scheduler_output.finished_req_ids.clear()
        return metadata


class KeepsBlockState(ReferenceConnector):
    """Puts the step's block state, a live view of the scheduler, into the metadata."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        metadata.__dict__["state"] = scheduler_output.kv_connector_block_state
        return metadata


class MonotonicProgress(ReferenceConnector):
    """Asserts that the computed tokens of a request never fall back: they do when a load fails and when drafts are rejected."""

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        tracked = self._tracked[request.request_id]
        assert computed >= tracked.__dict__.get("computed", 0)
        tracked.__dict__["computed"] = computed
        return super()._save_bound(request, computed, scheduled)


class UnknownFinish(ReferenceConnector):
    """Has no answer to the end of a request that never got blocks (B112)."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._tracked[request.request_id] is not None
        return super().request_finished(request, block_ids)


class EmptyBlocks(ReferenceConnector):
    """Takes for granted that a finished request has blocks (B057)."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert block_ids[-1] >= 0
        return super().request_finished(request, block_ids)


class LiveParams(ReferenceConnector):
    """Hands the request's own parameters back, which the engine then extends."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return super().request_finished(request, block_ids)[0], request.kv_transfer_params


class FinishAfterNew(ReferenceConnector):
    """Cleans up finished requests in the next step, and takes a new request of the same id for the old one."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        for req_id in scheduler_output.finished_req_ids:
            self._tracked.pop(req_id, None)
            self._granted.pop(req_id, None)
        return super().build_connector_meta(scheduler_output)


class BoundTooEarly(ReferenceConnector):
    """Reads the bound metadata in handle_preemptions, when none is bound."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        super().handle_preemptions(self._metadata())


class KeepsRequests(ReferenceConnector):
    """Remembers every request it has seen (B059)."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.__dict__.setdefault("_history", []).append(request)
        return super().request_finished(request, block_ids)


class ResetKeeps(ReferenceConnector):
    """Says that its cache was reset and goes on serving it (B086)."""

    def reset_cache(self) -> bool | None:
        return True


class SavesAcrossReset(ReferenceConnector):
    """A save that was under way during a reset becomes visible after it."""

    def _save(self, epoch: int, save: Save, layers: Any) -> None:
        super()._save(self._store.epoch(), save, layers)


class ShutdownOnce(ReferenceConnector):
    """Cannot be shut down twice (B132)."""

    def shutdown(self) -> None:
        super().shutdown()
        del self._bad


class SavesTooEarly(ReferenceConnector):
    """Reads the blocks when the metadata is bound, before the forward pass writes them (B007)."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        for save in self._metadata().saves:
            super()._save(self._metadata().epoch, save, self._layers)

    def wait_for_save(self) -> None:
        return
