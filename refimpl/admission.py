# SPDX-License-Identifier: Apache-2.0
"""Admission of waiting requests to a step: lookup, allocation, and the start of external loads."""

from __future__ import annotations

import operator
from typing import Any, Literal

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request, RequestStatus

from kvconform.compat.vllm_api import AWAITING_INPUT
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.errors import EngineAssertion
from kvconform.refimpl.step import Step

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


def admit_waiting(engine: Engine, step: Step) -> None:
    """Admit waiting requests to `step` until budget, slots, memory or the queue is exhausted.

    Requests that hold blocks come first. A request that cannot continue now is skipped and keeps
    its place. A request for which there is no memory ends the admission.
    """
    settings = engine.settings
    skipped_holding: list[Request] = []
    skipped_others: list[Request] = []
    awaiting = engine.get_num_awaiting_input()
    while (
        step.token_budget > 0
        and step.input_budget > settings.draft_slots
        and len(engine.running) + awaiting < settings.max_running
    ):
        queue = engine.kv_holding_waiting or (engine.waiting if engine.pause_level == 0 else None)
        if not queue:
            break
        request = queue[0]
        outcome = _admit(engine, step, request) if _is_ready(engine, request) else "skip"
        if outcome == "stop":
            if queue is engine.kv_holding_waiting and not _holds_blocks(request):
                # Where it is, it would keep those from going on that hold what it waits for.
                engine.waiting.prepend_requests([queue.popleft()])
            break
        queue.popleft()
        if outcome == "skip":
            (skipped_holding if _holds_blocks(request) else skipped_others).append(request)
    engine.kv_holding_waiting.prepend_requests(skipped_holding)
    engine.waiting.prepend_requests(skipped_others)


def _is_ready(engine: Engine, request: Request) -> bool:
    """Return whether the request may be admitted now.

    If its asynchronous load has been reported, the load is completed here.
    """
    if request.status == LOADING:
        if request.request_id not in engine.finished_recving_kv_req_ids:
            return False
        _finish_load(engine, request)
        was_preempted = request.num_preemptions > 0
        request.status = RequestStatus.PREEMPTED if was_preempted else RequestStatus.WAITING
    if request.status == AWAITING_INPUT:
        return False
    # Stale tokens that are still to be delivered would come twice if the request ran before them.
    return not request.num_stale_output_tokens or request.drop_stale_output


def _holds_blocks(request: Request) -> bool:
    return request.num_computed_tokens > 0 or request.status == LOADING


def _finish_load(engine: Engine, request: Request) -> None:
    """Publish what an asynchronous load brought; after a failure, what is left of it."""
    manager = engine.kv_cache_manager
    request_id = request.request_id
    if request_id in engine.failed_recving_kv_req_ids and not request.num_computed_tokens:
        manager.free(request)
        # It starts again from nothing: its own reservation must not block it.
        engine.inflight_prefills.discard(request)
    else:
        manager.cache_blocks(request, request.num_computed_tokens)
    # If everything was loaded, the last token is computed again, in place, for its logits (R024).
    request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
    engine.failed_recving_kv_req_ids.discard(request_id)
    engine.finished_recving_kv_req_ids.remove(request_id)


def _look_up(engine: Engine, request: Request) -> tuple[KVCacheBlocks, int, int, bool] | None:
    """Return (local blocks, local tokens, external tokens, whether to load asynchronously).

    None if the connector does not know yet. EngineAssertion if its answer is illegal.
    """
    manager = engine.kv_cache_manager
    blocks, local, request.shared_prefix_boundary = manager.get_computed_blocks(request)
    if engine.connector is None:
        return blocks, local, 0, False
    answer = engine.connector.get_num_new_matched_tokens(request, local)
    external, is_async = _checked_answer(answer, request)
    ignores_hits = external is not None and "ignore-hits" in engine.settings.policies
    if request.skip_reading_prefix_cache or ignores_hits:
        external, is_async = 0, False
    if external is None:
        return None
    if local + external > request.num_tokens:
        raise EngineAssertion(
            "R022",
            f"{request.request_id}: {external} tokens beyond {local}, "
            f"the request has {request.num_tokens}",
        )
    if is_async and external <= 0:
        raise EngineAssertion(
            "R026", f"{request.request_id}: an asynchronous load of {external} tokens"
        )
    return blocks, local, external, is_async


def _checked_answer(answer: Any, request: Request) -> tuple[int | None, bool]:
    """Return a lookup's answer as (tokens or None, asynchronous).

    EngineAssertion if it is not a pair that begins with a whole number or None.
    """
    try:
        tokens, is_async = answer
        return (None if tokens is None else operator.index(tokens)), bool(is_async)
    except (TypeError, ValueError) as error:
        raise EngineAssertion(
            "R029", f"{request.request_id}: lookup answered {answer!r}, not (int or None, bool)"
        ) from error


def _admit(engine: Engine, step: Step, request: Request) -> Literal["admitted", "skip", "stop"]:
    """Try to admit one request, and return the outcome.

    "skip": not now, try the next request. "stop": no budget or no memory is left, so no request
    behind it is admitted either.
    """
    settings = engine.settings
    manager = engine.kv_cache_manager
    connector = engine.connector

    blocks, local, external, is_async = manager.empty_kv_cache_blocks, 0, 0, False
    computed = request.num_computed_tokens
    if computed == 0:
        found = _look_up(engine, request)
        if found is None:
            return "skip"
        blocks, local, external, is_async = found
        computed = local + external

    new_tokens, drafts = (0, 0) if is_async else _chunk(engine, step, request, computed)
    if new_tokens is None:
        return "stop"
    if is_async and connector is not None:
        connector.get_loaded_kv_cache_group_ids(request)
    if "deny-first-alloc" in settings.policies and request not in engine.denied_once:
        engine.denied_once.add(request)
        return "stop"

    reserved_blocks = 0
    if is_async:
        # An asynchronous load holds its blocks without making progress: it must leave enough for
        # the requests that are already under way.
        needs = map(manager.blocks_to_complete, engine.inflight_prefills)
        reserved_blocks = settings.spec_step_blocks + sum(needs)
    granted = manager.allocate_slots(
        request,
        new_tokens,
        num_new_computed_tokens=local,
        new_computed_blocks=blocks,
        num_lookahead_tokens=0 if is_async else settings.num_lookahead,
        num_external_computed_tokens=external,
        delay_cache_blocks=is_async,
        full_sequence_must_fit=settings.reserve_full_prompt,
        reserved_blocks=reserved_blocks,
        has_scheduled_reqs=bool(engine.running),
    )
    if granted is None:
        return "stop"

    table = manager.get_blocks(request.request_id)
    if connector is not None:
        connector.update_state_after_alloc(request, table, external)
        # vLLM has this hook since 0.32.
        if (
            external > 0
            and not request.num_preemptions
            and hasattr(connector, "get_external_cache_hit_sources")
        ):
            connector.get_external_cache_hit_sources(request, external)
        was_looked_up = not request.num_computed_tokens
        if was_looked_up:
            _count_query(engine, request, local, external)

    request.num_computed_tokens = computed
    if is_async or computed + new_tokens < request.num_tokens:
        engine.inflight_prefills.add(request)
    if is_async:
        request.status = LOADING
        return "skip"
    (step.resumed if request.status == RequestStatus.PREEMPTED else step.new).append(request)
    step.take(request.request_id, table, new_tokens, settings.draft_slots)
    step.has_sync_loads |= external > 0
    if drafts:
        step.drafts[request.request_id] = [-1] * drafts
    request.status = RequestStatus.RUNNING
    engine.running.append(request)
    return "admitted"


def _count_query(engine: Engine, request: Request, local: int, external: int) -> None:
    """Count a lookup that led to an admission.

    The lookup of a request that reads no cache is not counted: its answer was discarded.
    """
    if engine.connector_prefix_cache_stats is not None and not request.skip_reading_prefix_cache:
        engine.connector_prefix_cache_stats.record(
            num_tokens=request.num_tokens - local,
            num_hits=external,
            preempted=request.num_preemptions > 0,
        )


def _chunk(engine: Engine, step: Step, request: Request, computed: int) -> tuple[int | None, int]:
    """Return (tokens to schedule, drafts among them).

    (None, 0) if the request has to wait for a larger budget.
    """
    settings = engine.settings
    drafts = 0
    budget = min(step.token_budget, step.input_budget - settings.draft_slots)
    new_tokens = request.num_tokens - computed
    joins_decodes = new_tokens == 1 and not step.has_prefill and (step.running or computed > 0)
    if settings.num_spec and joins_decodes:
        # Pad the token with drafts that will be rejected, so that all rows have one length.
        wide = 1 + settings.num_spec
        if computed + wide + 1 <= settings.max_model_len and not 0 < step.long_prefill < wide:
            if wide > budget:
                return None, 0
            new_tokens = wide
            drafts = settings.num_spec
    if 0 < step.long_prefill < new_tokens:
        new_tokens = step.long_prefill
    if new_tokens > budget and not settings.chunked_prefill:
        return None, 0
    if new_tokens <= 0:
        raise EngineAssertion(
            "R023",
            f"{request.request_id}: {computed} of {request.num_tokens} tokens computed, "
            "none left to run",
        )
    return min(new_tokens, budget), drafts
