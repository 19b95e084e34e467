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
    """What is decided so far: who runs, with how many tokens and which new blocks, and what is left of the budgets (tokens)."""

    token_budget: int
    input_budget: int
    long_prefill: int
    running: list[Request] = field(default_factory=list)
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, KVCacheBlocks] = field(
        default_factory=dict
    )  # new at the end of the table; the whole table for new and resumed
    drafts: dict[str, list[int]] = field(default_factory=dict)
    has_prefill: bool = False
    has_sync_loads: bool = False

    def take(
        self, request_id: str, blocks: KVCacheBlocks, new_tokens: int, draft_slots: int
    ) -> None:
        """Book tokens and blocks."""
        self.tokens[request_id], self.blocks[request_id] = new_tokens, blocks
        self.token_budget -= new_tokens
        self.input_budget -= new_tokens + draft_slots

    def give_back(self, request: Request, draft_slots: int) -> None:
        """Take a request that was scheduled in this step out of it again."""
        self.running.remove(request)
        tokens = self.tokens.pop(request.request_id)
        self.token_budget += tokens
        self.input_budget += tokens + draft_slots
        del self.blocks[request.request_id]
        self.drafts.pop(request.request_id, None)


def build_output(engine: Engine, step: Step) -> SchedulerOutput:
    """The step as vLLM's SchedulerOutput, without the connector's metadata. Computed tokens are those before the step (R058)."""
    v2, manager, before = engine.settings.v2, engine.kv_cache_manager, engine.scheduled_before
    if "reverse-batch" in engine.settings.policies:
        for requests in (step.running, step.new, step.resumed):
            requests.reverse()
        step.tokens = dict(reversed(step.tokens.items()))
    # Model runner V2 gets a resumed request as if it were new, with all its tokens (R062).
    new = step.new + step.resumed if v2 else step.new
    cached = step.running if v2 else step.running + step.resumed
    added = [step.blocks[request.request_id] for request in cached]
    output = make_scheduler_output(
        scheduled_new_reqs=[
            new_request_data(
                r, step.blocks[r.request_id].get_block_ids(), r._all_token_ids if v2 else None
            )
            for r in new
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[request.request_id for request in cached],
            resumed_req_ids=set() if v2 else {request.request_id for request in step.resumed},
            new_token_ids=[],
            all_token_ids={}
            if v2
            else {
                r.request_id: r.all_token_ids.copy() for r in cached if r.request_id not in before
            },
            new_block_ids=[
                None if blocks is manager.empty_kv_cache_blocks else blocks.get_block_ids()
                for blocks in added
            ],
            num_computed_tokens=[request.num_computed_tokens for request in cached],
            num_output_tokens=[
                request.num_output_tokens + request.num_output_placeholders for request in cached
            ],
        ),
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
