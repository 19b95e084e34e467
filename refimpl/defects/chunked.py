# SPDX-License-Identifier: Apache-2.0
"""Planted defects: connectors that save wrongly when a prompt is computed over several steps.

Blocks then fill up long after they were allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.plan import Save
from kvconform.refimpl.tracking import Tracked, scheduled

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class FirstStepOnly(ReferenceConnector):
    """Stores what the first step of a request computes, and nothing of later steps (B021, B032)."""

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> Iterator[Save]:
        new = {entry.req_id for entry in scheduler_output.scheduled_new_reqs}
        return (save for save in super()._plan_saves(scheduler_output) if save.req in new)


class NeedsNewBlocks(ReferenceConnector):
    """Stores only in steps with new blocks (B003).

    The step that fills a block usually brings none.
    """

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> Iterator[Save]:
        growing = {
            req_id for req_id, _, blocks, _ in scheduled(scheduler_output) if blocks is not None
        }
        return (save for save in super()._plan_saves(scheduler_output) if save.req in growing)


class NeedsNewBlocksUndeclared(NeedsNewBlocks):
    """The same in a connector that promises nothing (B003)."""

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {"store": True}


class AllHashes(ReferenceConnector):
    """Stores every block that has a hash and a block id.

    The whole prompt has hashes before any of it is computed.
    """

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        table = self._tracked[request.request_id].table
        return min(len(request.block_hashes), len(table)) * self._block_size


class DropsPartialChunk(ReferenceConnector):
    """Gives up a chunk that the end of a prefill step cuts in two (B034).

    What is stored behind that chunk cannot be found.
    """

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        save = super()._plan_save(tracked, end, scheduled, final)
        request = tracked.request
        in_prefill = request.num_computed_tokens + scheduled < request.num_prompt_tokens
        if in_prefill and end % self.options.chunk_tokens:
            tracked.outdated = True
        return save


class OneTokenIsDecode(ReferenceConnector):
    """Takes a step with one token of every request for a step of decoding.

    It stores prompts only, so it stores nothing then, and nothing at the end. Beside decoding
    requests, the budget may leave one token for a prefill.
    """

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> Iterator[Save]:
        decodes = max(scheduler_output.num_scheduled_tokens.values(), default=0) == 1
        for save in super()._plan_saves(scheduler_output):
            yield replace(save, pieces=()) if decodes else save

    def _finish_bound(self, request: Request) -> int:
        return 0


class OneTokenEndsPrefill(ReferenceConnector):
    """Takes a request with one token in a step for one that decodes, whose prompt is computed.

    So it stores a block of the prompt before its tokens are computed.
    """

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        bound = super()._save_bound(request, computed, scheduled)
        if scheduled != 1:
            return bound
        table = self._tracked[request.request_id].table
        return max(bound, min(request.num_prompt_tokens, len(table) * self._block_size))


class StopsBeforeTheLastToken(ReferenceConnector):
    """Saves a prompt up to its last token: a block that ends there is left out.

    A lookup for the same prompt leaves that token to be computed, so only a longer prompt asks for
    the block.
    """

    def _worth_saving(self, request: Request, end: int) -> int:
        return min(super()._worth_saving(request, end), request.num_prompt_tokens - 1)


class ZipsParallelLists(ReferenceConnector):
    """Walks through the requests of a step together with their new_token_ids (B152).

    That list is empty unless there are several pipeline stages.
    """

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> Iterator[Save]:
        cached = scheduler_output.scheduled_cached_reqs
        seen = {req_id for req_id, _ in zip(cached.req_ids, cached.new_token_ids, strict=False)}
        seen.update(entry.req_id for entry in scheduler_output.scheduled_new_reqs)
        return (save for save in super()._plan_saves(scheduler_output) if save.req in seen)
