# SPDX-License-Identifier: Apache-2.0
"""Admission: from the waiting queue into a step. Lookup, allocation, and the start of external loads."""

from __future__ import annotations

import operator
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request, RequestStatus

from kvconform.refimpl.engine import Engine
from kvconform.refimpl.errors import EngineAssertion
from kvconform.refimpl.step import Step

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


def admit_waiting(engine: Engine, step: Step) -> None:
    """Admit waiting requests into `step` until the budget, the slots, the memory or the queue is exhausted.

    Who holds blocks comes first. A request that cannot go on now is skipped and keeps its place; one that finds no memory ends it.
    """
    settings, holding, others = engine.settings, list[Request](), list[Request]()
    while (
        step.token_budget > 0
        and step.input_budget > settings.draft_slots
        and len(engine.running) < settings.max_running
    ):
        queue = engine.kv_holding_waiting or (engine.waiting if engine.pause_level == 0 else None)
        if not queue:
            break
        request = queue[0]
        outcome = _admit(engine, step, request) if _is_ready(engine, request) else "skip"
        if outcome == "stop":
            break
        queue.popleft()
        if outcome == "skip":
            (
                holding if request.num_computed_tokens > 0 or request.status == LOADING else others
            ).append(request)
    engine.kv_holding_waiting.prepend_requests(holding)
    engine.waiting.prepend_requests(others)


def _is_ready(engine: Engine, request: Request) -> bool:
    """Whether the request may be admitted now. A finished asynchronous load is taken into account here."""
    if request.status == LOADING:
        if request.request_id not in engine.finished_recving_kv_req_ids:
            return False
        _finish_load(engine, request)
        request.status = (
            RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        )
    # Tokens that are still to be delivered would come twice if the request ran again before them.
    return not request.num_stale_output_tokens or request.drop_stale_output


def _finish_load(engine: Engine, request: Request) -> None:
    """Publish what an asynchronous load brought; after a failure, what is left of it."""
    manager, request_id = engine.kv_cache_manager, request.request_id
    if request_id in engine.failed_recving_kv_req_ids and not request.num_computed_tokens:
        manager.free(request)
        engine.inflight_prefills.discard(
            request
        )  # it starts anew: its reservation must not stand in its own way
    else:
        manager.cache_blocks(request, request.num_computed_tokens)
    # If everything was loaded, the last token is computed again, in place, for its logits (R024).
    request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
    engine.failed_recving_kv_req_ids.discard(request_id)
    engine.finished_recving_kv_req_ids.remove(request_id)


def _look_up(engine: Engine, request: Request) -> tuple[KVCacheBlocks, int, int, bool] | None:
    """(local blocks, local tokens, external tokens, load asynchronously); None when the connector does not know yet."""
    blocks, local, _ = engine.kv_cache_manager.get_computed_blocks(request)
    if engine.connector is None:
        return blocks, local, 0, False
    external, is_async = _checked_answer(
        engine.connector.get_num_new_matched_tokens(request, local), request
    )
    if request.skip_reading_prefix_cache or (
        external is not None and "ignore-hits" in engine.settings.policies
    ):
        external, is_async = 0, False
    if external is None:
        return None
    if local + external > request.num_tokens:
        raise EngineAssertion(
            "R022",
            f"{request.request_id}: {external} tokens beyond {local}, the request has {request.num_tokens}",
        )
    if is_async and external <= 0:
        raise EngineAssertion(
            "R026", f"{request.request_id}: an asynchronous load of {external} tokens"
        )
    return blocks, local, external, is_async


def _checked_answer(answer: Any, request: Request) -> tuple[int | None, bool]:
    """A lookup's answer as (tokens or None, asynchronous). EngineAssertion if it is not a pair with a whole number."""
    try:
        tokens, is_async = answer
        return (None if tokens is None else operator.index(tokens)), bool(is_async)
    except (TypeError, ValueError) as error:
        raise EngineAssertion(
            "R029", f"{request.request_id}: lookup answered {answer!r}, not (int or None, bool)"
        ) from error


def _admit(engine: Engine, step: Step, request: Request) -> str:
    """Admit one request: 'admitted', 'skip' (not now, try the next) or 'stop' (no budget or no memory: nobody behind it either)."""
    settings, manager, connector = engine.settings, engine.kv_cache_manager, engine.connector
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
    granted = manager.allocate_slots(
        request,
        new_tokens,
        num_new_computed_tokens=local,
        new_computed_blocks=blocks,
        num_lookahead_tokens=0 if is_async else settings.num_lookahead,
        num_external_computed_tokens=external,
        delay_cache_blocks=is_async,
        full_sequence_must_fit=settings.reserve_full_prompt,
        # An asynchronous load holds its blocks without making progress: it must leave enough for who is already on the way.
        reserved_blocks=settings.spec_step_blocks
        + sum(map(manager.blocks_to_complete, engine.inflight_prefills))
        if is_async
        else 0,
        has_scheduled_reqs=bool(engine.running),
    )
    if granted is None:
        return "stop"
    table = manager.get_blocks(request.request_id)
    if connector is not None:
        connector.update_state_after_alloc(request, table, external)
        if (
            external > 0
            and not request.num_preemptions
            and hasattr(connector, "get_external_cache_hit_sources")
        ):  # since 0.32
            connector.get_external_cache_hit_sources(request, external)
        if not request.num_computed_tokens:  # it was looked up
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
    """Count a lookup that led to an admission; not that of a request that reads no cache, whose answer was thrown away."""
    if engine.connector_prefix_cache_stats is not None and not request.skip_reading_prefix_cache:
        tokens, again = request.num_tokens - local, request.num_preemptions > 0
        engine.connector_prefix_cache_stats.record(
            num_tokens=tokens, num_hits=external, preempted=again
        )


def _chunk(engine: Engine, step: Step, request: Request, computed: int) -> tuple[int | None, int]:
    """(tokens to schedule, drafts among them): None when the request has to wait for a larger budget."""
    settings, drafts = engine.settings, 0
    budget = min(step.token_budget, step.input_budget - settings.draft_slots)
    new_tokens = request.num_tokens - computed
    if (
        settings.num_spec
        and new_tokens == 1
        and not step.has_prefill
        and (step.running or computed > 0)
    ):
        # One token beside decoding requests: pad it with drafts that will be rejected, so that all rows have one length.
        wide = 1 + settings.num_spec
        if computed + wide + 1 <= settings.max_model_len and not 0 < step.long_prefill < wide:
            if wide > budget:
                return None, 0
            new_tokens, drafts = wide, settings.num_spec
    if 0 < step.long_prefill < new_tokens:
        new_tokens = step.long_prefill
    if new_tokens > budget and not settings.chunked_prefill:
        return None, 0
    if new_tokens <= 0:
        raise EngineAssertion(
            "R023",
            f"{request.request_id}: {computed} of {request.num_tokens} tokens computed, none left to run",
        )
    return min(new_tokens, budget), drafts
