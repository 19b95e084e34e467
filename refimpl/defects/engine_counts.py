# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine's scheduler: counts, tables and tokens that are not what they should be."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request, RequestStatus

from kvconform.refimpl import admission, scheduler, transfers
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.faulty import fault
from kvconform.refimpl.kv_manager import KVManager
from kvconform.refimpl.scheduler import ReferenceScheduler


@fault(ReferenceScheduler, "_next_tokens")
def schedules_past_the_end(next_tokens: Any, engine: Engine, request: Request, step: Any) -> int:
    """Schedules one token more than there is, for every decoding request."""
    count = int(next_tokens(engine, request, step))
    return (
        count + 1
        if count > 0 and request.num_output_tokens and count < step.token_budget
        else count
    )


@fault(scheduler, "build_output")
def counts_ahead(build: Any, engine: Engine, step: Any) -> Any:
    """Advances the computed counts before it builds the output."""
    output = build(engine, step)
    cached = output.scheduled_cached_reqs
    cached.num_computed_tokens = [
        count + output.num_scheduled_tokens[request_id]
        for request_id, count in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    ]
    return output


@fault(scheduler, "build_output")
def drops_a_new_block(build: Any, engine: Engine, step: Any) -> Any:
    """Tells only of the first of the blocks that a running request was given."""
    output = build(engine, step)
    cached = output.scheduled_cached_reqs
    cached.new_block_ids = [
        blocks if blocks is None or request_id in cached.resumed_req_ids else (list(blocks[0])[:1],)
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
    ]
    return output


@fault(scheduler, "build_output")
def forgets_absent_tokens(build: Any, engine: Engine, step: Any) -> Any:
    """Does not repeat the tokens of a request that the step before left out."""
    output = build(engine, step)
    output.scheduled_cached_reqs.all_token_ids = {}
    return output


@fault(scheduler, "build_output")
def shows_placeholders_as_tokens(build: Any, engine: Engine, step: Any) -> Any:
    """Shows placeholders as tokens with the id -1."""
    output = build(engine, step)
    for request_id, tokens in output.scheduled_cached_reqs.all_token_ids.items():
        tokens.extend([-1] * (engine.requests[request_id].num_output_placeholders + 1))
    return output


@fault(scheduler, "build_output")
def resumes_without_tokens(build: Any, engine: Engine, step: Any) -> Any:
    """With model runner V2, sends a resumed request without the tokens that it has generated."""
    output = build(engine, step)
    for new in output.scheduled_new_reqs:
        if new.prefill_token_ids is not None:
            new.prefill_token_ids = list(new.prompt_token_ids)
    return output


@fault(ReferenceScheduler, "_advance")
def placeholder_in_sync(advance: Any, engine: Engine, output: Any) -> None:
    """Makes a placeholder under synchronous scheduling too, which is taken back when the token is there."""
    advance(engine, output)
    if not engine.settings.is_async:
        for request_id in output.num_scheduled_tokens:
            engine.requests[request_id].num_output_placeholders += 1


@fault(ReferenceScheduler, "_advance")
def placeholder_per_chunk(advance: Any, engine: Engine, output: Any) -> None:
    """Makes a placeholder for every chunk of a prompt, not only for the last."""
    advance(engine, output)
    for request_id in output.num_scheduled_tokens if engine.settings.is_async else ():
        request = engine.requests[request_id]
        request.num_output_placeholders += request.is_prefill_chunk


@fault(ReferenceScheduler, "_advance")
def no_placeholder(advance: Any, engine: Engine, output: Any) -> None:
    """Makes no placeholder for a token in flight: what is computed seems to be known."""
    advance(engine, output)
    for request_id in output.num_scheduled_tokens if engine.settings.is_async else ():
        request = engine.requests[request_id]
        request.num_output_placeholders = max(0, request.num_output_placeholders - 1)


@fault(scheduler, "land")
def keeps_rejected_placeholders(land: Any, engine: Engine, output: Any, result: Any) -> Any:
    """Takes rejected drafts out of the computed count, but leaves their placeholders (B028)."""
    before = {
        i: engine.requests[i].num_output_placeholders
        for i in output.num_scheduled_tokens
        if i in engine.requests
    }
    found = land(engine, output, result)
    for request_id, count in before.items():
        request = engine.requests.get(request_id)
        if (
            request is not None
            and engine.settings.is_async
            and output.scheduled_spec_decode_tokens.get(request_id)
        ):
            request.num_output_placeholders = max(request.num_output_placeholders, count - 1)
    return found


@fault(scheduler, "land")
def keeps_rejected_tokens(land: Any, engine: Engine, output: Any, result: Any) -> Any:
    """Leaves rejected drafts in the computed count."""
    before = {
        i: engine.requests[i].num_computed_tokens
        for i in output.num_scheduled_tokens
        if i in engine.requests
    }
    found = land(engine, output, result)
    for request_id, count in before.items():
        request = engine.requests.get(request_id)
        if (
            request is not None
            and not request.is_finished()
            and request.num_computed_tokens < count
        ):
            request.num_computed_tokens = count
    return found


@fault(scheduler, "land")
def keeps_rejections_altogether(land: Any, engine: Engine, output: Any, result: Any) -> Any:
    """Leaves rejected drafts in both counts: their difference is right, and both grow without end."""
    before = {
        i: engine.requests[i].num_computed_tokens
        for i in output.num_scheduled_tokens
        if i in engine.requests
    }
    found = land(engine, output, result)
    for request_id, count in before.items():
        request = engine.requests.get(request_id)
        if (
            request is not None
            and engine.settings.is_async
            and 0 < request.num_computed_tokens < count
            and not request.is_finished()
        ):
            request.num_output_placeholders += count - request.num_computed_tokens
            request.num_computed_tokens = count
    return found


@fault(ReferenceScheduler, "_advance")
def skips_a_prompt_token(advance: Any, engine: Engine, output: Any) -> None:
    """Counts a token more than was scheduled when a prompt goes on in another step."""
    advance(engine, output)
    for request_id in output.num_scheduled_tokens:
        request = engine.requests[request_id]
        request.num_computed_tokens += (
            request.is_prefill_chunk and request.num_computed_tokens < request.num_prompt_tokens - 1
        )


@fault(transfers, "failed_loads")
def keeps_placeholders_of_a_failed_load(
    failed_loads: Any, engine: Engine, reported: Any, scheduled: dict[str, int]
) -> Any:
    """Rolls a request back whose load has failed, but not its placeholders (B004)."""
    before = {request: request.num_output_placeholders for request in engine.running}
    found = failed_loads(engine, reported, scheduled)
    for request, count in before.items():
        if request.request_id in found:
            request.num_output_placeholders = count
    return found


@fault(transfers, "failed_loads")
def overlooks_a_failed_load(
    failed_loads: Any, engine: Engine, reported: Any, scheduled: dict[str, int]
) -> Any:
    """Cuts only the first of several requests back that share a failed block (B070)."""
    before = {request: request.num_computed_tokens for request in engine.running}
    found = failed_loads(engine, reported, scheduled)
    hit = [request for request in before if request.request_id in found]
    for request in hit[1:]:
        request.num_computed_tokens = before[request]
    return {request.request_id for request in hit[:1]} | (
        found - {request.request_id for request in hit}
    )


@fault(admission, "_finish_load")
def counts_loaded_blocks(finish_load: Any, engine: Engine, request: Request) -> None:
    """Takes whole blocks for loaded when a load ends within one (B037)."""
    finish_load(engine, request)
    table = engine.kv_cache_manager.get_block_ids(request.request_id)[0]
    request.num_computed_tokens = min(
        len(table) * engine.settings.block_size, request.num_tokens - 1
    )


@fault(Engine, "preempt_now")
def preempts_in_silence(
    preempt: Any, engine: Engine, request: Request, *, drop_stale: bool
) -> None:
    """Does not name preempted requests in the output: workers do not flush what still reads their blocks (B010, B022)."""
    preempt(engine, request, drop_stale=drop_stale)
    engine.preempted_req_ids.discard(request.request_id)


@fault(Engine, "preempt_now")
def preempts_with_placeholders(
    preempt: Any, engine: Engine, request: Request, *, drop_stale: bool
) -> None:
    """Makes a placeholder for the token that a preempted request was about to sample."""
    preempt(engine, request, drop_stale=drop_stale)
    request.num_output_placeholders = int(engine.settings.is_async)


@fault(scheduler, "build_output")
def drafts_beside_the_tokens(build: Any, engine: Engine, step: Any) -> Any:
    """Names the drafts of the step before, which are not among the scheduled tokens."""
    output = build(engine, step)
    for request_id, drafts in output.scheduled_spec_decode_tokens.items():
        drafts.extend([-1] * (output.num_scheduled_tokens[request_id] - len(drafts)))
    return output


@fault(KVManager, "allocate_slots")
def slots_for_the_next_token_only(
    allocate: Any, manager: KVManager, request: Request, tokens: int, *args: Any, **kwargs: Any
) -> Any:
    """Gives a running request slots for one token, however many are scheduled."""
    return allocate(
        manager, request, 1 if request.status == RequestStatus.RUNNING else tokens, *args, **kwargs
    )


@fault(scheduler, "build_output")
def repeats_the_table(build: Any, engine: Engine, step: Any) -> Any:
    """Sends the whole table of a running request that was given a block."""
    output = build(engine, step)
    cached, manager = output.scheduled_cached_reqs, engine.kv_cache_manager
    cached.new_block_ids = [
        blocks and manager.get_block_ids(request_id)
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
    ]
    return output
