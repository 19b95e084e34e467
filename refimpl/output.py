# SPDX-License-Identifier: Apache-2.0
"""Landing of a step: its sampled tokens, rejected drafts and stops, and the connector's report."""

from __future__ import annotations

from collections import defaultdict

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvconform.compat.vllm_api import FINISHED_ERROR, later
from kvconform.refimpl import sessions, transfers
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.errors import EngineAssertion


def land(
    engine: Engine, output: SchedulerOutput, result: ModelRunnerOutput
) -> dict[int, EngineCoreOutputs]:
    """Apply the result of the oldest step in flight. Returns the clients' outputs by client index.

    Order (R204): deferred frees, failed loads, sampled tokens (request_finished), requests that
    fail, update_connector_output, finished transfers, get_kv_connector_stats, take_events.
    """
    if engine.settings.defer_frees and output.total_num_scheduled_tokens:
        engine.landed_steps += 1
        while engine.deferred_frees and engine.deferred_frees[0][0] <= engine.landed_steps:
            _, blocks = engine.deferred_frees.popleft()
            engine.kv_cache_manager.block_pool.free_blocks(reversed(blocks))
    reported = result.kv_connector_output
    failed: set[str] = set()
    if reported:
        failed = transfers.failed_loads(engine, reported)

    scheduled = engine.in_flight.pop(id(output), (output, engine.requests))[1]
    outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
    stopped: set[Request] = set()
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = engine.requests.get(request_id)
        if request is None or request != scheduled.get(request_id):
            continue  # finished; its id may belong to another request now
        request.num_in_flight_tokens -= tokens
        is_stale = request.num_stale_output_tokens > 0
        if is_stale:
            request.num_stale_output_tokens -= tokens
        is_dropped = is_stale and request.drop_stale_output
        if request_id in failed or request.is_finished() or is_dropped:
            continue
        sampled: list[int] = []
        vector = None
        if result.sampled_token_ids:
            sampled = result.sampled_token_ids[result.req_id_to_index[request_id]]
        elif result.pooler_output:
            vector = result.pooler_output[result.req_id_to_index[request_id]]
        if vector is not None:
            request.status = RequestStatus.FINISHED_STOPPED
            outputs[request.client_index].append(_pooled(engine, request, vector))
            stopped.add(request)
        if not sampled:
            continue
        drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
        accepted = len(sampled) - 1
        rejected = len(drafts) - accepted
        if request.num_computed_tokens > 0:
            request.num_computed_tokens -= rejected
        if request.num_output_placeholders > 0:
            request.num_output_placeholders -= rejected
        new_tokens = _append(engine, request, sampled, is_stale)
        item = EngineCoreOutput(request_id=request_id, new_token_ids=new_tokens)
        item.stop_reason = request.stop_reason  # in a session, of an earlier turn
        outputs[request.client_index].append(item)
        if request.is_finished():
            item.finish_reason = request.get_finished_reason()
            if not request.resumable or sessions.end_turn(engine, request):
                stopped.add(request)
                item.kv_transfer_params = engine.end(request)
    engine.leave_queues(stopped)

    if failed and not engine.settings.recompute_failed_loads:
        for request in engine.finish_requests(sorted(failed), FINISHED_ERROR):
            item = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
            )
            outputs[request.client_index].append(item)

    if engine.connector is not None:
        if reported:
            transfers.finished(engine, engine.connector, reported)
        stats = engine.connector.get_kv_connector_stats()
        if (
            stats is not None
            and not stats.is_empty()
            and reported
            and reported.kv_connector_stats is not None
        ):
            reported.kv_connector_stats.aggregate(stats)
        list(engine.connector.take_events() or ())
    return {client: EngineCoreOutputs(outputs=items) for client, items in outputs.items()}


def _pooled(engine: Engine, request: Request, vector: torch.Tensor) -> EngineCoreOutput:
    """End a request with its vector; return its output."""
    item = EngineCoreOutput(request_id=request.request_id, new_token_ids=[], pooling_output=vector)
    item.finish_reason = request.get_finished_reason()
    item.kv_transfer_params = engine.end(request)
    return item


def _append(engine: Engine, request: Request, sampled: list[int], is_stale: bool) -> list[int]:
    """Append tokens until one stops the request; return the tokens appended.

    Publishes the blocks that are now known and computed, if the request runs.
    """
    was_running = request.status == RequestStatus.RUNNING
    count = 0
    stops = False
    while count < len(sampled) and not stops:
        request.append_output_token_ids(sampled[count])
        stops = _stops(engine, request, sampled[count])
        count += 1
    if engine.settings.is_async:
        if not is_stale:
            request.num_output_placeholders -= count
        placeholders = request.num_output_placeholders
        if placeholders < 0:
            raise EngineAssertion(
                "R161", f"{request.request_id}: more tokens than placeholders ({placeholders})"
            )
        if was_running:
            known = request.num_computed_tokens - placeholders
            engine.kv_cache_manager.cache_blocks(request, known)
    return sampled[:count]


def _stops(engine: Engine, request: Request, token: int) -> bool:
    """Return whether `token`, the last one, ends the request; if so, set its final status."""
    params = request.sampling_params
    if token == later(params, "eos_token_id", None):
        request.status = RequestStatus.FINISHED_STOPPED
    elif token in (params.stop_token_ids or ()):
        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = token
    elif (
        request.num_tokens >= engine.settings.max_model_len
        or request.num_output_tokens >= request.max_tokens
    ):
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    return request.is_finished()
