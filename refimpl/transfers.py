# SPDX-License-Identifier: Apache-2.0
"""Reports of the connector after a step: failed loads, finished loads, finished sends."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvconform.refimpl.engine import Engine
from kvconform.refimpl.errors import EngineAssertion

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


def failed_loads(engine: Engine, reported: KVConnectorOutput) -> set[str]:
    """Cut back every request that a failed load touches.

    Returns the ids of the requests whose output of this step does not count. With the policy
    "recompute", C falls to the last good block: a running request continues from there, a loading
    one when its load has been reported. With "fail", all of them will end with an error.
    EngineAssertion for blocks that failed in a model with several groups.
    """
    recompute = engine.settings.recompute_failed_loads
    invalid = reported.invalid_block_ids or set()
    if invalid and len(engine.settings.groups) > 1:
        raise EngineAssertion(
            "R131", f"blocks {sorted(invalid)} failed: with several groups, name the requests"
        )
    loading: set[str] = set()
    for request_id in reported.failed_recving or ():
        request = engine.requests.get(request_id)
        if request is not None and request.status == LOADING:
            loading.add(request_id)
            if recompute:
                request.num_computed_tokens = 0
    holding = [request for request in engine.kv_holding_waiting if request.status == LOADING]
    loading |= _cut_back(engine, holding, invalid, evict=False)
    # Recomputed blocks stay in the prefix cache: the requests that share them are cut back too, and
    # the first of them computes the blocks.
    running = _cut_back(engine, engine.running, invalid, evict=not recompute)
    if not recompute:
        return loading | running
    _start_over(engine, loading | running)
    engine.failed_recving_kv_req_ids |= loading
    if engine.settings.is_async:
        for request_id in running:
            # Later steps in flight read the bad KV: their tokens must not count either, so their
            # placeholders are removed (R136).
            request = engine.requests[request_id]
            request.num_output_placeholders = 0
            request.spec_token_ids = []
            request.num_stale_output_tokens = request.num_in_flight_tokens
            request.drop_stale_output = True
    return running


def _start_over(engine: Engine, request_ids: set[str]) -> None:
    """Let requests start over that have no blocks where their next token reads.

    A load is granted only what the token behind it reads.
    """
    for request in map(engine.requests.__getitem__, sorted(request_ids)):
        if engine.kv_cache_manager.holds_what_is_read(request):
            continue
        if request.status == LOADING:
            request.num_computed_tokens = 0
        else:
            engine.leave_queues({request})
            engine.preempt_now(request, drop_stale=True)


def _cut_back(
    engine: Engine,
    requests: list[Request],
    invalid: set[int],
    *,
    evict: bool,
) -> set[str]:
    """Set C of each request to the start of the first invalid block that it has to recompute.

    An invalid block is recomputed by the first request that has it. The others only fall back to
    before this step; what later steps in flight compute rests on the block, too, and does not
    count. Returns the ids of all requests that have an invalid block.
    """
    affected: set[str] = set()
    if not invalid:
        return affected
    block_size = engine.settings.block_size
    taken: set[int] = set()  # blocks that an earlier request recomputes
    for request in requests:
        counted = request.num_in_flight_tokens - request.num_stale_output_tokens
        computed = request.num_computed_tokens - counted
        table = engine.kv_cache_manager.get_block_ids(request.request_id)[0]
        computed_blocks = table[: max(0, -(-computed // block_size))]
        bad = [i for i, block_id in enumerate(computed_blocks) if block_id in invalid]
        own = [i for i in bad if table[i] not in taken]
        taken.update(table[i] for i in own)
        if bad:
            affected.add(request.request_id)
            request.num_computed_tokens = own[0] * block_size if own else computed
        if own and evict:
            engine.kv_cache_manager.block_pool.evict_blocks(table[own[0] :])
    return affected


def finished(engine: Engine, connector: KVConnectorBase_V1, reported: KVConnectorOutput) -> None:
    """Pass the report to the connector, then free or wake the requests in it.

    EngineAssertion for a request that does not wait for such a report.
    """
    connector.update_connector_output(reported)
    for what, ids in (
        ("finished_recving", reported.finished_recving),
        ("finished_sending", reported.finished_sending),
    ):
        for request_id in sorted(ids or ()):
            request = engine.requests.get(request_id)
            if request is None:
                raise EngineAssertion(
                    "R146",
                    f"{what} for {request_id}, which the engine does not know or has already freed",
                )
            if what == "finished_sending" or request.is_finished():
                engine.forget(request)
            elif request.status == LOADING:
                engine.finished_recving_kv_req_ids.add(request_id)
            else:
                raise EngineAssertion(
                    "R079",
                    f"{what} for {request_id}, which is {request.status.name} and loads nothing",
                )
