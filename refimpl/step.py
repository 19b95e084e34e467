# SPDX-License-Identifier: Apache-2.0
"""One step while it is being scheduled, and the SchedulerOutput that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.request import Request

from kvconform.compat.step import block_state, make_scheduler_output, new_request_data
from kvconform.refimpl.engine import Engine


@dataclass(slots=True)
class Step:
    """A step under construction: its requests, their tokens and new blocks, the budgets left.

    Budgets are in tokens. `tokens`, `blocks` and `drafts` are by request id. `blocks` are the new
    ones at the end of the table; for new and resumed requests, the whole table.
    """

    token_budget: int
    input_budget: int
    long_prefill: int
    running: list[Request] = field(default_factory=list)
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, KVCacheBlocks] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    has_prefill: bool = False
    has_sync_loads: bool = False

    def take(
        self, request_id: str, blocks: KVCacheBlocks, new_tokens: int, draft_slots: int
    ) -> None:
        """Enter a request's tokens and blocks, and deduct them from the budgets."""
        self.tokens[request_id] = new_tokens
        self.blocks[request_id] = blocks
        self.token_budget -= new_tokens
        self.input_budget -= new_tokens + draft_slots

    def give_back(self, request: Request, draft_slots: int) -> None:
        """Remove a running request that was already scheduled in this step."""
        self.running.remove(request)
        tokens = self.tokens.pop(request.request_id)
        self.token_budget += tokens
        self.input_budget += tokens + draft_slots
        del self.blocks[request.request_id]
        self.drafts.pop(request.request_id, None)


def build_output(engine: Engine, step: Step) -> SchedulerOutput:
    """Return the step as vLLM's SchedulerOutput, without the connector's metadata.

    Computed tokens are those before the step (R058).
    """
    v2 = engine.settings.v2
    manager = engine.kv_cache_manager
    if "reverse-batch" in engine.settings.policies:
        for requests in (step.running, step.new, step.resumed):
            requests.reverse()
        step.tokens = dict(reversed(step.tokens.items()))
    # Model runner V2 gets a resumed request as if it were new, with all its tokens (R062).
    new = step.new + step.resumed if v2 else step.new
    output = make_scheduler_output(
        scheduled_new_reqs=[
            new_request_data(
                request,
                step.blocks[request.request_id].get_block_ids(),
                request._all_token_ids if v2 else None,
            )
            for request in new
        ],
        scheduled_cached_reqs=_cached_requests(engine, step),
        num_scheduled_tokens=step.tokens,
        total_num_scheduled_tokens=sum(step.tokens.values()),
        scheduled_spec_decode_tokens=step.drafts,
        scheduled_encoder_inputs={},
        preempted_req_ids=engine.preempted_req_ids,
        finished_req_ids=engine.finished_req_ids,
        free_encoder_mm_hashes=[],
        has_sync_kv_loads=step.has_sync_loads,
        num_spec_tokens_to_schedule=engine.num_spec_tokens,
    )
    engine.scheduled_before = set(step.tokens)
    if engine.connector is not None:
        output.kv_connector_block_state = block_state(set(step.tokens), manager.get_block_ids)
    return output


def _cached_requests(engine: Engine, step: Step) -> CachedRequestData:
    """Return the part of the output about requests that the workers already know."""
    v2 = engine.settings.v2
    cached = step.running if v2 else step.running + step.resumed
    nothing = engine.kv_cache_manager.empty_kv_cache_blocks
    added = [step.blocks[request.request_id] for request in cached]
    resumed: set[str] = set()
    all_token_ids: dict[str, list[int]] = {}
    if not v2:
        resumed = {request.request_id for request in step.resumed}
        # For connectors: the tokens of the requests that were not in the last step.
        all_token_ids = {
            request.request_id: request.all_token_ids.copy()
            for request in cached
            if request.request_id not in engine.scheduled_before
        }
    return CachedRequestData(
        req_ids=[request.request_id for request in cached],
        resumed_req_ids=resumed,
        new_token_ids=[],
        all_token_ids=all_token_ids,
        new_block_ids=[None if blocks is nothing else blocks.get_block_ids() for blocks in added],
        num_computed_tokens=[request.num_computed_tokens for request in cached],
        num_output_tokens=[
            request.num_output_tokens + request.num_output_placeholders for request in cached
        ],
    )
