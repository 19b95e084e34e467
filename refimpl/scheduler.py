# SPDX-License-Identifier: Apache-2.0
"""The reference scheduler: an executable definition of an engine's scheduling.

It defines how requests are scheduled, and when the connector's scheduler half is called.
"""

from __future__ import annotations

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from kvconform.refimpl import sessions
from kvconform.refimpl.admission import admit_waiting
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.output import land
from kvconform.refimpl.step import Step, build_output


class ReferenceScheduler(Engine):
    """A scheduler of requests over the KV cache groups of a model.

    It calls the connector where vLLM 0.32 does, in the same order and with the same arguments.
    `schedule` decides a step, `update_from_output` lands it. With asynchronous scheduling, any
    number of steps may be in flight between the two; they land in order.
    """

    def add_request(self, request: Request) -> None:
        """Queue a request, or give a session its next input. EngineAssertion for an id in use."""
        session = self.requests.get(request.request_id)
        if session is not None and session.resumable:
            sessions.proceed(self, session, request)
            return
        if request.resumable:
            sessions.begin(request)
        super().add_request(request)

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, and advance the computed tokens of its requests.

        Running requests come first. Waiting requests are admitted unless a request was preempted.
        """
        is_paused = self.pause_level >= 2
        token_budget = 0 if is_paused else self.settings.token_budget
        step = Step(token_budget, self.settings.input_budget, self._long_prefill())
        self._schedule_running(step)
        if not step.preempted and not self.preempted_between_steps and not is_paused:
            admit_waiting(self, step)
        self.preempted_between_steps = False

        output = build_output(self, step)
        if self.connector is not None:
            output.kv_connector_metadata = self.connector.build_connector_meta(output)
        output.kv_connector_block_state = None  # valid inside the hook only (R067)
        self._advance(output)
        return output

    def _long_prefill(self) -> int:
        """Return the longest prefill chunk of this step, in tokens; 0: no limit.

        The limit leaves budget for other requests, so there is none for a single request.
        """
        settings = self.settings
        count = len(self.running) + len(self.waiting) + len(self.kv_holding_waiting)
        if not settings.long_prefill or (count <= 1 and "split-prefill" not in settings.policies):
            return 0
        if settings.long_prefill_adaptive:
            return max(settings.long_prefill, settings.input_budget // count)
        return settings.long_prefill

    def _schedule_running(self, step: Step) -> None:
        """Give every running request its next tokens, in order.

        When memory is short, requests are preempted, by default from the end of the list.
        """
        draft_slots = self.settings.draft_slots
        index = 0
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
                # With priorities, a victim may have been before it in the list.
                index = self.running.index(request) + 1
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
        """Return how many tokens a running request may compute now; 0 or less if none."""
        computed = request.num_computed_tokens
        placeholders = request.num_output_placeholders
        most_tokens = request.num_prompt_tokens + request.max_tokens
        if placeholders and computed + 2 - placeholders >= most_tokens:
            return 0  # the steps in flight reach max_tokens even if every draft is rejected
        tokens = request.num_tokens_with_spec + placeholders - computed
        if 0 < step.long_prefill < tokens:
            tokens = step.long_prefill
        return min(
            tokens,
            step.token_budget,
            step.input_budget - self.settings.draft_slots,
            self.settings.max_model_len - computed - self.num_sampled_tokens_per_step,
        )

    def _allocate(self, request: Request, new_tokens: int, step: Step) -> KVCacheBlocks | None:
        """Allocate slots for a running request, preempting others until there is room.

        None if it cannot run in this step; then the requests behind it do not run either.
        """
        while True:
            blocks = self.kv_cache_manager.allocate_slots(
                request, new_tokens, num_lookahead_tokens=self.settings.num_lookahead
            )
            if blocks is not None:
                return blocks
            if self.connector is not None and self.connector.has_pending_block_frees():
                return None
            victim = self._victim()
            if not self.frees_at_once(victim):
                return None  # its blocks would be freed too late: let its step land first (R160)
            self.running.remove(victim)
            if victim in step.running:
                step.give_back(victim, self.settings.draft_slots)
            self.preempt_now(victim, drop_stale=self.requires_kv_delivery)
            step.preempted.append(victim)
            if victim is request:
                return None

    def _victim(self) -> Request:
        """Return the running request to preempt next."""
        if self.settings.priority:
            return max(self.running, key=lambda r: (r.priority, r.arrival_time))
        return self.running[-1]

    def _advance(self, output: SchedulerOutput) -> None:
        """Count the step as computed, before it has run.

        With asynchronous scheduling, the token that it will sample and its drafts become
        placeholders.
        """
        if self.settings.defer_frees and output.total_num_scheduled_tokens:
            self.scheduled_steps += 1
        drafts = output.scheduled_spec_decode_tokens
        placeholder_drafts = [-1] * self.num_spec_tokens
        scheduled: dict[str, Request] = {}
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            scheduled[request_id] = request
            request.num_computed_tokens += tokens
            request.num_in_flight_tokens += tokens
            request.last_sched_seq = self.scheduled_steps
            request.is_prefill_chunk = (
                request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
            )
            if request.is_prefill_chunk:
                continue
            self.inflight_prefills.discard(request)
            if self.settings.is_async:
                new = self.num_sampled_tokens_per_step + len(drafts.get(request_id, ()))
                request.num_output_placeholders += new
                request.spec_token_ids = placeholder_drafts
        self.in_flight[id(output)] = (output, scheduled)
        self.finished_req_ids = set()
        self.preempted_req_ids = set()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Land the oldest step in flight: see `output.land`."""
        return land(self, scheduler_output, model_runner_output)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Set the drafts for the next step (synchronous scheduling).

        Ignored for requests that are finished or in the middle of their prompt.
        """
        for request_id, drafts in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                request.spec_token_ids = [] if request.is_prefill_chunk else drafts
