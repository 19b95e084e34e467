# SPDX-License-Identifier: Apache-2.0
"""The reference scheduler: a small, executable definition of how an engine schedules requests and calls a connector's scheduler half."""

from __future__ import annotations

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from kvconform.refimpl.admission import admit_waiting
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.output import land
from kvconform.refimpl.step import Step, build_output


class ReferenceScheduler(Engine):
    """Schedules requests over one KV cache group and calls the connector where vLLM 0.32 does, in the same order with the same arguments.

    `schedule` decides a step, `update_from_output` lands it; with asynchronous scheduling any number of steps may be between the two,
    landed in order. C, P and N are explained in engine.py.
    """

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: running requests first, then, unless somebody was preempted, waiting ones. C of each advances here."""
        step = Step(
            self.settings.token_budget if self.pause_level < 2 else 0,
            self.settings.input_budget,
            self._long_prefill(),
        )
        self._schedule_running(step)
        if not step.preempted and not self.preempted_between_steps and self.pause_level < 2:
            admit_waiting(self, step)
        self.preempted_between_steps = False

        output = build_output(self, step)
        if self.connector is not None:
            output.kv_connector_metadata = self.connector.build_connector_meta(output)
        output.kv_connector_block_state = None  # valid inside the hook only (R067)
        self._advance(output)
        return output

    def _long_prefill(self) -> int:
        """The longest chunk (tokens) that leaves something for the others; 0: no limit, as for a request that is alone."""
        settings, count = (
            self.settings,
            len(self.running) + len(self.waiting) + len(self.kv_holding_waiting),
        )
        if not settings.long_prefill or (count <= 1 and "split-prefill" not in settings.policies):
            return 0
        return (
            max(settings.long_prefill, settings.input_budget // count)
            if settings.long_prefill_adaptive
            else settings.long_prefill
        )

    def _schedule_running(self, step: Step) -> None:
        """Give every running request its next tokens, in order, preempting from the end of the list when memory is short."""
        draft_slots, index = self.settings.draft_slots, 0
        while (
            index < len(self.running) and step.token_budget > 0 and step.input_budget > draft_slots
        ):
            request = self.running[index]
            index += 1
            new_tokens = self._next_tokens(request, step)
            if new_tokens <= 0:
                continue
            blocks = self._allocate(request, new_tokens, step)
            if blocks is None:
                break
            if step.preempted:
                index = (
                    self.running.index(request) + 1
                )  # with priorities, a victim may have stood before it
            step.running.append(request)
            step.has_prefill |= request.is_prefill_chunk
            step.take(request.request_id, blocks, new_tokens, draft_slots)
            if request.spec_token_ids:
                drafts = (
                    new_tokens
                    + request.num_computed_tokens
                    - request.num_tokens
                    - request.num_output_placeholders
                )
                if drafts > 0:
                    step.drafts[request.request_id] = request.spec_token_ids[:drafts]
                request.spec_token_ids = []

    def _next_tokens(self, request: Request, step: Step) -> int:
        """How many tokens a running request may have now; 0 or less if none."""
        computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
        if (
            placeholders
            and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
        ):
            return 0  # what is in flight reaches max_tokens even if every draft is rejected
        tokens = request.num_tokens_with_spec + placeholders - computed
        if 0 < step.long_prefill < tokens:
            tokens = step.long_prefill
        return min(
            tokens,
            step.token_budget,
            step.input_budget - self.settings.draft_slots,
            self.settings.max_model_len - computed - 1,
        )

    def _allocate(self, request: Request, new_tokens: int, step: Step) -> KVCacheBlocks | None:
        """Slots for a running request, preempting others until there is room. None: it cannot run in this step, nor can those behind it."""
        lookahead = self.settings.num_lookahead
        while (
            blocks := self.kv_cache_manager.allocate_slots(
                request, new_tokens, num_lookahead_tokens=lookahead
            )
        ) is None:
            if self.connector is not None and self.connector.has_pending_block_frees():
                return None
            victim = (
                max(self.running, key=lambda r: (r.priority, r.arrival_time))
                if self.settings.priority
                else self.running[-1]
            )
            if not self.frees_at_once(victim):
                return None  # its blocks would come back too late: let its step land first (R160)
            self.running.remove(victim)
            if victim in step.running:
                step.give_back(victim, self.settings.draft_slots)
            self.preempt_now(victim, drop_stale=self.requires_kv_delivery)
            step.preempted.append(victim)
            if victim is request:
                return None
        return blocks

    def _advance(self, output: SchedulerOutput) -> None:
        """Count the step as computed, before it ran. Asynchronous: the token that it will sample, and its drafts, become placeholders."""
        if self.settings.defer_frees and output.total_num_scheduled_tokens:
            self.scheduled_steps += 1
        is_async, drafts = self.settings.is_async, output.scheduled_spec_decode_tokens
        placeholder_drafts = [-1] * self.num_spec_tokens
        scheduled: dict[str, Request] = {}
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = scheduled[request_id] = self.requests[request_id]
            request.num_computed_tokens += tokens
            request.num_in_flight_tokens += tokens
            request.last_sched_seq = self.scheduled_steps
            request.is_prefill_chunk = (
                request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
            )
            if request.is_prefill_chunk:
                continue
            self.inflight_prefills.discard(request)
            if is_async:
                request.num_output_placeholders += 1 + len(drafts.get(request_id, ()))
                request.spec_token_ids = placeholder_drafts
        self.in_flight[id(output)] = (output, scheduled)
        self.finished_req_ids = set()
        self.preempted_req_ids = set()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Land a step: the tokens that it sampled, the drafts that it rejected, the transfers that finished or failed."""
        return land(self, scheduler_output, model_runner_output)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Drafts for the next step (synchronous scheduling); ignored for requests that are gone or in the middle of their prompt."""
        for request_id, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                request.spec_token_ids = [] if request.is_prefill_chunk else drafts
