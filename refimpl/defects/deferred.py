# SPDX-License-Identifier: Apache-2.0
"""Planted defects: saves that could not be done in their own step, and saves without any work."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import Finish, ReferenceConnector
from kvconform.refimpl.delay import Countdown
from kvconform.refimpl.plan import ReferenceMetadata, Save
from kvconform.refimpl.variants.hybrid import HybridConnector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class RetriesFromMemory(HybridConnector):
    """Has every save refused at first, and repeats it from the block ids of then (B133).

    It forgets requests that are preempted or finished. Blocks that have left a window since belong
    to another request, and nothing says so.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._refused: Countdown[Save] = Countdown()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ReferenceMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        self._refused.drop(lambda save: save.req not in self._tracked)
        saves = [save for save in metadata.saves if save.final]
        for save in metadata.saves:
            if not save.final:
                self._refused.add(save, 2)
        return replace(metadata, saves=(*saves, *self._refused.poll()))


class NothingLeftToSave(ReferenceConnector):
    """Keeps the blocks of every finished request, to save what it has (B149).

    A save of what is in the store already has nothing to do, and its end is not reported.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Requests of which something was saved.
        self._written: set[str] = set()

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        if request.request_id in self._tracked:
            self._tracked[request.request_id].planned = True
        return super().request_finished(request, block_ids)

    def _save(self, epoch: int, save: Save, layers: Iterable[str]) -> None:
        if save.pieces:
            self._written.add(save.req)
        if save.req in self._written:
            super()._save(epoch, save, layers)
