# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine's scheduler: wrong counts, block tables and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.request import Request, RequestStatus

from kvconform.refimpl.defects import targets
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.kv_manager import KVManager


@targets.BUILD_OUTPUT.after
def counts_ahead(output: Any, engine: Engine, step: Any) -> None:
    """Advance the computed counts before the output is built."""
    cached = output.scheduled_cached_reqs
    cached.num_computed_tokens = [
        count + output.num_scheduled_tokens[request_id]
        for request_id, count in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    ]


@targets.BUILD_OUTPUT.after
def drops_a_new_block(output: Any, engine: Engine, step: Any) -> None:
    """Name only the first of the new blocks of a running request."""
    cached = output.scheduled_cached_reqs
    cached.new_block_ids = [
        blocks if blocks is None or request_id in cached.resumed_req_ids else (list(blocks[0])[:1],)
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
    ]


@targets.BUILD_OUTPUT.after
def repeats_the_table(output: Any, engine: Engine, step: Any) -> None:
    """Send the whole block table of a running request that was given a block."""
    cached, manager = output.scheduled_cached_reqs, engine.kv_cache_manager
    cached.new_block_ids = [
        blocks and manager.get_block_ids(request_id)
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
    ]


@targets.BUILD_OUTPUT.after
def forgets_absent_tokens(output: Any, engine: Engine, step: Any) -> None:
    """Do not repeat the tokens of a request that the step before left out."""
    output.scheduled_cached_reqs.all_token_ids = {}


@targets.BUILD_OUTPUT.after
def shows_placeholders_as_tokens(output: Any, engine: Engine, step: Any) -> None:
    """Show placeholders as tokens with the id -1."""
    for request_id, tokens in output.scheduled_cached_reqs.all_token_ids.items():
        tokens.extend([-1] * (engine.requests[request_id].num_output_placeholders + 1))


@targets.BUILD_OUTPUT.after
def resumes_without_tokens(output: Any, engine: Engine, step: Any) -> None:
    """Send a resumed request without its generated tokens (model runner V2)."""
    for new in output.scheduled_new_reqs:
        if new.prefill_token_ids is not None:
            new.prefill_token_ids = list(new.prompt_token_ids)


@targets.BUILD_OUTPUT.after
def drafts_beside_the_tokens(output: Any, engine: Engine, step: Any) -> None:
    """Name the drafts of the step before, which are not among the scheduled tokens."""
    for request_id, drafts in output.scheduled_spec_decode_tokens.items():
        drafts.extend([-1] * (output.num_scheduled_tokens[request_id] - len(drafts)))


@targets.NEXT_TOKENS.replaced_by
def schedules_past_the_end(next_tokens: Any, engine: Engine, request: Request, step: Any) -> int:
    """Schedule one token more than there is, for every decoding request."""
    count = int(next_tokens(engine, request, step))
    is_decoding = count > 0 and request.num_output_tokens > 0
    return count + 1 if is_decoding and count < step.token_budget else count


@targets.ALLOCATE_SLOTS.replaced_by
def slots_for_the_next_token_only(
    allocate: Any, manager: KVManager, request: Request, tokens: int, *args: Any, **kwargs: Any
) -> Any:
    """Give a running request slots for one token, however many are scheduled."""
    slots = 1 if request.status == RequestStatus.RUNNING else tokens
    return allocate(manager, request, slots, *args, **kwargs)


@targets.PREEMPT_NOW.after
def preempts_in_silence(_: None, engine: Engine, request: Request, *, drop_stale: bool) -> None:
    """Do not name preempted requests in the output (B010, B022).

    The workers then do not flush what still reads the blocks of those requests.
    """
    engine.preempted_req_ids.discard(request.request_id)


@targets.PREEMPT_NOW.after
def preempts_with_placeholders(
    _: None, engine: Engine, request: Request, *, drop_stale: bool
) -> None:
    """Make a placeholder for the token that a preempted request was about to sample."""
    request.num_output_placeholders = int(engine.settings.is_async)


@targets.ADVANCE.after
def placeholder_in_sync(_: None, engine: Engine, output: Any) -> None:
    """Make a placeholder under synchronous scheduling too, and remove it with the token."""
    if not engine.settings.is_async:
        for request_id in output.num_scheduled_tokens:
            engine.requests[request_id].num_output_placeholders += 1


@targets.ADVANCE.after
def placeholder_per_chunk(_: None, engine: Engine, output: Any) -> None:
    """Make a placeholder for every chunk of a prompt, not only for the last one."""
    if engine.settings.is_async:
        for request_id in output.num_scheduled_tokens:
            request = engine.requests[request_id]
            request.num_output_placeholders += request.is_prefill_chunk


@targets.ADVANCE.after
def no_placeholder(_: None, engine: Engine, output: Any) -> None:
    """Make no placeholder for a token in flight, so that all computed tokens seem to be known."""
    if engine.settings.is_async:
        for request_id in output.num_scheduled_tokens:
            request = engine.requests[request_id]
            request.num_output_placeholders = max(0, request.num_output_placeholders - 1)


@targets.ADVANCE.after
def skips_a_prompt_token(_: None, engine: Engine, output: Any) -> None:
    """Count one token more than was scheduled when a prompt goes on in another step."""
    for request_id in output.num_scheduled_tokens:
        request = engine.requests[request_id]
        goes_on = request.num_computed_tokens < request.num_prompt_tokens - 1
        if request.is_prefill_chunk and goes_on:
            request.num_computed_tokens += 1


def _counts(engine: Engine, output: Any, name: str) -> dict[str, int]:
    """Return the count `name` of each scheduled request that still exists, by request id."""
    scheduled = (engine.requests.get(request_id) for request_id in output.num_scheduled_tokens)
    return {each.request_id: getattr(each, name) for each in scheduled if each is not None}


def _remaining(engine: Engine, before: dict[str, int]) -> Iterator[tuple[Request, int]]:
    """Yield each request of `before` that still exists, with its count in `before`."""
    for request_id, count in before.items():
        if (request := engine.requests.get(request_id)) is not None:
            yield request, count


@targets.LAND.replaced_by
def keeps_rejected_placeholders(land: Any, engine: Engine, output: Any, result: Any) -> Any:
    """Remove rejected drafts from the computed count, and keep their placeholders (B028)."""
    before = _counts(engine, output, "num_output_placeholders")
    found = land(engine, output, result)
    for request, count in _remaining(engine, before):
        had_drafts = output.scheduled_spec_decode_tokens.get(request.request_id)
        if engine.settings.is_async and had_drafts:
            request.num_output_placeholders = max(request.num_output_placeholders, count - 1)
    return found


@targets.LAND.replaced_by
def keeps_rejected_tokens(land: Any, engine: Engine, output: Any, result: Any) -> Any:
    """Keep rejected drafts in the computed count."""
    before = _counts(engine, output, "num_computed_tokens")
    found = land(engine, output, result)
    for request, count in _remaining(engine, before):
        if not request.is_finished():
            request.num_computed_tokens = max(request.num_computed_tokens, count)
    return found


@targets.LAND.replaced_by
def keeps_rejections_altogether(land: Any, engine: Engine, output: Any, result: Any) -> Any:
    """Keep rejected drafts in both counts: their difference is right, and both grow without end."""
    before = _counts(engine, output, "num_computed_tokens")
    found = land(engine, output, result)
    for request, count in _remaining(engine, before):
        was_cut = 0 < request.num_computed_tokens < count
        if engine.settings.is_async and was_cut and not request.is_finished():
            request.num_output_placeholders += count - request.num_computed_tokens
            request.num_computed_tokens = count
    return found


@targets.FAILED_LOADS.replaced_by
def keeps_placeholders_of_a_failed_load(failed_loads: Any, engine: Engine, reported: Any) -> Any:
    """Roll back a request whose load has failed, but not its placeholders (B004)."""
    before = {request: request.num_output_placeholders for request in engine.running}
    found = failed_loads(engine, reported)
    for request, count in before.items():
        if request.request_id in found:
            request.num_output_placeholders = count
    return found


@targets.FAILED_LOADS.replaced_by
def overlooks_a_failed_load(failed_loads: Any, engine: Engine, reported: Any) -> Any:
    """Roll back only the first of several requests that share a failed block (B070)."""
    before = {request: request.num_computed_tokens for request in engine.running}
    found = failed_loads(engine, reported)
    hit = [request for request in before if request.request_id in found]
    for request in hit[1:]:
        request.num_computed_tokens = before[request]
    return found - {request.request_id for request in hit[1:]}


@targets.FINISH_LOAD.after
def counts_loaded_blocks(_: None, engine: Engine, request: Request) -> None:
    """Count whole blocks as loaded when a load ends within a block (B037)."""
    table = engine.kv_cache_manager.get_block_ids(request.request_id)[0]
    request.num_computed_tokens = min(
        len(table) * engine.settings.block_size, request.num_tokens - 1
    )
