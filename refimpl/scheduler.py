# SPDX-License-Identifier: Apache-2.0
"""The reference scheduler: a small, executable definition of how an engine schedules requests and calls a KV connector's scheduler half.

The state of a request is vLLM's own `Request`. In the comments: C = num_computed_tokens (counts every scheduled step, landed or not),
P = num_output_placeholders (tokens sampled but not known yet, asynchronous scheduling only), N = num_tokens (known token ids).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from kvconform.refimpl.admission import admit_waiting
from kvconform.refimpl.control import EngineControl
from kvconform.refimpl.errors import EngineAssertion
from kvconform.refimpl.kv_manager import KVManager
from kvconform.refimpl.output import land
from kvconform.refimpl.queues import WaitingQueue
from kvconform.refimpl.settings import read_settings
from kvconform.refimpl.step import Step, build_output
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


class ReferenceScheduler(EngineControl):
    """Schedules requests over one KV cache group and calls the connector where vLLM 0.32 does, in the same order with the same arguments.

    `schedule` decides a step, `update_from_output` lands it; with asynchronous scheduling any number of steps may be between the two,
    landed in order. `policies` are names from settings.POLICIES.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        connector: KVConnectorBase_V1 | None,
        *,
        block_size: int,
        async_scheduling: bool,
        runner: str = "v1",
        policies: frozenset[str] = frozenset(),
    ) -> None:
        self.settings = read_settings(
            vllm_config, kv_cache_config, block_size=block_size, async_scheduling=async_scheduling, runner=runner, policies=policies
        )
        self.vllm_config, self.kv_cache_config = vllm_config, kv_cache_config
        self.uses_mrope = vllm_config.model_config.uses_mrope
        self.num_spec_tokens = self.settings.num_spec
        self.connector = connector
        # Asked once (R162): whether tokens that were in flight at a preemption are dropped, for their KV was promised to somebody.
        self.requires_kv_delivery = connector.requires_kv_delivery if connector is not None else False
        self.kv_cache_manager = KVManager(self.settings)
        if connector is not None:
            connector.bind_kv_cache_manager(self.kv_cache_manager)

        self.requests: dict[str, Request] = {}  # also finished ones whose blocks a transfer still holds
        self.waiting = WaitingQueue(self.settings.priority)
        self.kv_holding_waiting = WaitingQueue(self.settings.priority)  # loading, or loaded: served before `waiting`
        self.running: list[Request] = []
        self.pause_level = 0  # 1: nothing new starts; 2: nothing runs

        self.finished_req_ids: set[str] = set()  # since the last step
        self.preempted_req_ids: set[str] = set()  # since the last step
        self.scheduled_before: set[str] = set()  # in the last step
        self.finished_recving_kv_req_ids: set[str] = set()
        self.failed_recving_kv_req_ids: set[str] = set()
        self.inflight_prefills: set[Request] = set()  # loading or in the middle of their prompt: their blocks are spoken for
        self.in_flight: dict[int, tuple[SchedulerOutput, dict[str, Request]]] = {}  # id(output) -> who was scheduled

        # Deferred frees (R150): blocks wait until every step that may write them has landed. Both counters count steps with tokens.
        self.scheduled_steps = self.landed_steps = 0
        self.deferred_frees: deque[tuple[int, list[KVCacheBlock]]] = deque()
        self.denied_once: set[Request] = set()  # policy deny-first-alloc
        self.preempted_between_steps = False

    # -- a step --

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: running requests first, then, unless somebody was preempted, waiting ones. C of each advances here."""
        settings = self.settings
        long_prefill = settings.long_prefill
        waiting = len(self.waiting) + len(self.kv_holding_waiting)
        if long_prefill and "split-prefill" not in settings.policies:
            long_prefill = long_prefill if len(self.running) + waiting > 1 else 0
            if long_prefill and settings.long_prefill_adaptive:
                long_prefill = max(long_prefill, settings.input_budget // (len(self.running) + waiting))
        step = Step(settings.token_budget if self.pause_level < 2 else 0, settings.input_budget, long_prefill)
        self._schedule_running(step)
        if waiting and not step.preempted and not self.preempted_between_steps and self.pause_level < 2:
            admit_waiting(self, step)
        self.preempted_between_steps = False

        output = build_output(self, step)
        if self.connector is not None:
            output.kv_connector_metadata = self.connector.build_connector_meta(output)
        output.kv_connector_block_state = None  # valid inside the hook only (R067)
        self._advance(output)
        return output

    def _schedule_running(self, step: Step) -> None:
        """Give every running request its next tokens, in order, preempting from the end of the list when memory is short."""
        draft_slots, index = self.settings.draft_slots, 0
        while index < len(self.running) and step.token_budget > 0 and step.input_budget > draft_slots:
            request = self.running[index]
            new_tokens = self._next_tokens(request, step)
            if new_tokens <= 0:
                index += 1
                continue
            blocks = self._allocate(request, new_tokens, step)
            if blocks is None:
                break
            step.running.append(request)
            step.has_prefill |= request.is_prefill_chunk
            step.take(request.request_id, blocks, new_tokens, draft_slots)
            index = self.running.index(request, 0, index + 1) + 1 if step.preempted else index + 1
            if request.spec_token_ids:
                drafts = new_tokens + request.num_computed_tokens - request.num_tokens - request.num_output_placeholders
                if drafts > 0:
                    step.drafts[request.request_id] = request.spec_token_ids[:drafts]
                request.spec_token_ids = []

    def _next_tokens(self, request: Request, step: Step) -> int:
        """How many tokens a running request may have now; 0 or less if none."""
        computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
        if placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
            return 0  # what is in flight reaches max_tokens even if every draft is rejected
        tokens = request.num_tokens_with_spec + placeholders - computed
        if 0 < step.long_prefill < tokens:
            tokens = step.long_prefill
        return min(tokens, step.token_budget, step.input_budget - self.settings.draft_slots, self.settings.max_model_len - computed - 1)

    def _allocate(self, request: Request, new_tokens: int, step: Step) -> KVCacheBlocks | None:
        """Slots for a running request, preempting others until there is room. None: it cannot run in this step, nor can those behind it."""
        lookahead = self.settings.num_lookahead
        while (blocks := self.kv_cache_manager.allocate_slots(request, new_tokens, num_lookahead_tokens=lookahead)) is None:
            if self.connector is not None and self.connector.has_pending_block_frees():
                return None
            victim = max(self.running, key=lambda r: (r.priority, r.arrival_time)) if self.settings.priority else self.running[-1]
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

    def preempt_now(self, request: Request, *, drop_stale: bool) -> None:
        """Take the blocks of a request that left `running` and put it in front of the waiting ones. It will compute everything again."""
        self._free_blocks(request)
        self.inflight_prefills.discard(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.spec_token_ids = []
        # What is in flight is stale (R161): delivered without moving the counters, or dropped. Once dropped it stays dropped.
        request.drop_stale_output = drop_stale or (request.drop_stale_output and request.num_stale_output_tokens > 0)
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_preemptions += 1
        self.waiting.prepend_requests([request])
        self.preempted_req_ids.add(request.request_id)

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
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
            if request.is_prefill_chunk:
                continue
            self.inflight_prefills.discard(request)
            if is_async:
                request.num_output_placeholders += 1 + len(drafts.get(request_id, ()))
                request.spec_token_ids = placeholder_drafts
        self.in_flight[id(output)] = (output, scheduled)
        self.finished_req_ids = set()
        self.preempted_req_ids = set()

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Land a step: the tokens that it sampled, the drafts that it rejected, the transfers that finished or failed."""
        return land(self, scheduler_output, model_runner_output)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Drafts for the next step (synchronous scheduling); ignored for requests that are gone or in the middle of their prompt."""
        for request_id, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                request.spec_token_ids = [] if request.is_prefill_chunk else drafts

    # -- requests --

    def add_request(self, request: Request) -> None:
        """Queue a request. EngineAssertion if its id is in use."""
        if request.request_id in self.requests:
            raise EngineAssertion("R060", f"duplicate request id {request.request_id}")
        if request.resumable or request.pooling_params is not None or request.structured_output_request is not None:
            raise ValueError(f"The reference scheduler runs plain generation only; {request.request_id} wants more.")
        self.waiting.add_request(request)
        self.requests[request.request_id] = request
        if self.connector is not None:
            self.connector.on_new_request(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """End requests from outside (abort, error), in the order given; None: all. Returns those that were not finished yet."""
        ids = [request_ids] if isinstance(request_ids, str) else list(self.requests if request_ids is None else dict.fromkeys(request_ids))
        ending = [r for r in map(self.requests.get, ids) if r is not None and not r.is_finished()]
        gone = set(ending)
        self.running = [request for request in self.running if request not in gone]
        self.waiting.remove_requests(gone)
        self.kv_holding_waiting.remove_requests(gone)
        for request in ending:
            request_id = request.request_id
            # A load that is under way writes into the blocks: they are freed when it reports (R126).
            loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and request_id not in self.finished_recving_kv_req_ids
            self.finished_recving_kv_req_ids.discard(request_id)
            self.failed_recving_kv_req_ids.discard(request_id)
            request.status = finished_status
            self.end(request, delay_free=loading)
        return ending

    def end(self, request: Request, *, delay_free: bool = False) -> dict[str, Any] | None:
        """Tell the connector that a request is finished; free its blocks unless it takes them. Returns what the client is to get."""
        delay, params = False, None
        self.inflight_prefills.discard(request)
        self.denied_once.discard(request)
        if self.connector is not None:
            covering = -(-request.num_computed_tokens // self.settings.block_size)
            table = self.kv_cache_manager.get_block_ids(request.request_id)[0][:covering]
            if isinstance(self.connector, SupportsHMA):
                delay, params = self.connector.request_finished_all_groups(request, (table,))
            else:
                delay, params = self.connector.request_finished(request, table)
        self.finished_req_ids.add(request.request_id)
        if not (delay or delay_free):
            self.forget(request)
        return params

    def forget(self, request: Request) -> None:
        """Free a finished request's blocks and drop it. EngineAssertion if it is not finished."""
        if not request.is_finished():
            raise EngineAssertion("R146", f"{request.request_id} is {request.status.name}, not finished: its blocks cannot be freed")
        self._free_blocks(request)
        del self.requests[request.request_id]

    def frees_at_once(self, request: Request) -> bool:
        return not self.settings.defer_frees or request.last_sched_seq <= self.landed_steps

    def _free_blocks(self, request: Request) -> None:
        if self.frees_at_once(request):
            self.kv_cache_manager.free(request)
        elif blocks := self.kv_cache_manager.pop_blocks_for_free(request):
            self.deferred_frees.append((self.scheduled_steps, blocks))
