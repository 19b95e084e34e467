# SPDX-License-Identifier: Apache-2.0
"""A connector that saves a preempted request before its blocks are overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import Finish
from kvconform.refimpl.inspector import Inspector
from kvconform.refimpl.plan import ReferenceMetadata, Save
from kvconform.refimpl.tracking import scheduled
from kvconform.refimpl.variants.saving import AtFinish

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass(frozen=True)
class FlushingMetadata(ReferenceMetadata):
    """The plan of a step. `flushes`: saves of preempted requests, for handle_preemptions."""

    flushes: tuple[Save, ...] = ()


class FlushInspector(Inspector):
    """Shows these saves as those of finished requests: before the forward pass."""

    def plan(self, metadata: object) -> list[dict[str, Any]]:
        assert isinstance(metadata, FlushingMetadata)
        flushes = [replace(save, final=True) for save in metadata.flushes]
        return super().plan(replace(metadata, saves=(*metadata.saves, *flushes)))


class FlushesPreempted(AtFinish):
    """Saves everything when the request has finished, or is preempted.

    A worker gets a step's metadata in handle_preemptions, before what the step does to the blocks
    of preempted requests (KVConnectorBase_V1.handle_preemptions).
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        # The end of the KV that each request has when its latest step was executed.
        self._ends: dict[str, int] = {}
        self._flushes: list[Save] = []

    def kvconform_inspector(self) -> Inspector:
        return FlushInspector()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        flushes, self._flushes = tuple(self._flushes), []
        return FlushingMetadata(**vars(metadata), flushes=flushes)

    def _forget_preempted(self, preempted: Iterable[str]) -> None:
        victims = list(preempted)
        for req_id in victims:
            tracked = self._tracked.get(req_id)
            if tracked is None or tracked.fresh:
                continue  # its blocks are new ones
            known = tracked.request.num_tokens
            end = min(self._ends.get(req_id, 0), known - 1)
            save = self._plan_save(tracked, self._worth_saving(tracked.request, end), 0)
            if save.pieces:
                # The engine counts none of its tokens as computed any more.
                self._flushes.append(replace(save, counters=(end, 0, known, 0)))
        super()._forget_preempted(victims)

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> Iterator[Save]:
        for req_id, computed, _, _ in scheduled(scheduler_output):
            self._ends[req_id] = computed + scheduler_output.num_scheduled_tokens[req_id]
        return super()._plan_saves(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        self._ends.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # Before blocks count as repaired whose load failed: what a request has of them is not.
        if isinstance(kv_connector_metadata, FlushingMetadata):
            for save in kv_connector_metadata.flushes:
                self._save(kv_connector_metadata.epoch, save, self._layers)
        super().handle_preemptions(kv_connector_metadata)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        if connector_output.invalid_block_ids:
            self._ends.clear()  # whose tokens are computed again shows when they are scheduled
