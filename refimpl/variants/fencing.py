# SPDX-License-Identifier: Apache-2.0
"""A connector that reads the blocks of finished and preempted requests without holding them.

The engine frees a block without wiping it, and nothing writes it before the worker step in which it
belongs to its next owner. So it is enough to finish the copies of a block in `handle_preemptions`
of that step. vLLM's OffloadingConnector does so (systems.md C4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from kvconform.refimpl.connector import Finish, ReferenceConnector
from kvconform.refimpl.plan import ReferenceMetadata, Save
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass(frozen=True)
class FencedMetadata(ReferenceMetadata):
    """The plan of a step, and what the worker needs to fence its copies.

    `handed_out`: blocks that have a new owner from this step on. `finished`: the last saves of
    finished requests.
    """

    handed_out: frozenset[int] = frozenset()
    finished: tuple[Save, ...] = ()


class Fenced(ReferenceConnector):
    """Saves some polls later, even if the request was finished or preempted meanwhile.

    Use with `async_saves` and a `save_delay`.
    """

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # The blocks of each request as of the last step.
        self._seen: dict[str, set[int]] = {}
        self._handed_out: set[int] = set()

    # -- Scheduler half

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        # After a preemption, it may get blocks that it had before.
        self._seen.pop(request.request_id, None)
        self._notice(self._tracked[request.request_id])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        # Kept apart: their blocks may have a new owner in this very step.
        finished = tuple(self._final)
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        for tracked in self._tracked.values():
            self._notice(tracked)
        fenced = FencedMetadata(
            metadata.epoch,
            metadata.loads,
            metadata.saves[len(finished) :],
            # A copy under way is as good after a preemption as before it.
            dropped=frozenset(),
            repaired=metadata.repaired,
            handed_out=frozenset(self._handed_out),
            finished=finished,
        )
        self._handed_out = set()
        return fenced

    def _notice(self, tracked: Tracked) -> None:
        """Note the blocks that are new in the request's table.

        Some may be shared; they are fenced needlessly.
        """
        seen = self._seen.setdefault(tracked.request.request_id, set())
        self._handed_out |= set(tracked.table) - seen
        seen |= set(tracked.table)

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        super().request_finished(request, block_ids)
        self._seen.pop(request.request_id, None)
        self._final = [replace(save, final=False) for save in self._final]
        return False, None

    # -- Worker half

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, FencedMetadata)
        metadata = kv_connector_metadata
        finished = [
            save if self._is_sound(save) else replace(save, pieces=()) for save in metadata.finished
        ]
        super().handle_preemptions(metadata)
        for save in finished:
            self._save_queue.add((metadata.epoch, save), self.options.save_delay)
        due = self._save_queue.take(
            lambda queued: not metadata.handed_out.isdisjoint(queued[1].table)
        )
        for epoch, save in due:
            self._save(epoch, save, self._layers)
