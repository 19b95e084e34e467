# SPDX-License-Identifier: Apache-2.0
"""What the connector reports after a step: failed loads, finished loads, finished sends."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvconform.refimpl.engine import Engine
from kvconform.refimpl.errors import EngineAssertion

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


def failed_loads(
    engine: Engine, reported: KVConnectorOutput, scheduled: dict[str, int]
) -> set[str]:
    """Cut back every request that a failed load touches. Returns the ids whose output of this step does not count.

    With the policy "recompute", C falls to the last good block: a running request goes on from there, a loading one when its load has
    reported. With "fail", all of them will end as errors.
    """
    recompute, invalid = engine.settings.recompute_failed_loads, reported.invalid_block_ids or set()
    loading = {
        i
        for i in reported.failed_recving or ()
        if i in engine.requests and engine.requests[i].status == LOADING
    }
    for request_id in loading if recompute else ():
        engine.requests[request_id].num_computed_tokens = 0
    loading |= _cut_back(
        engine,
        [r for r in engine.kv_holding_waiting if r.status == LOADING],
        invalid,
        scheduled,
        evict=False,
    )
    # Recomputed blocks keep their place in the prefix cache: who shares them is cut back too, the first of them computes.
    running = _cut_back(engine, engine.running, invalid, scheduled, evict=not recompute)
    if not recompute:
        return loading | running
    engine.failed_recving_kv_req_ids |= loading
    for request_id in running if engine.settings.is_async else ():
        # Later steps in flight read the bad KV: their tokens must not count either, so the placeholders go with them (R136).
        request = engine.requests[request_id]
        request.num_output_placeholders, request.spec_token_ids = 0, []
        request.num_stale_output_tokens, request.drop_stale_output = (
            request.num_in_flight_tokens,
            True,
        )
    return running


def _cut_back(
    engine: Engine,
    requests: list[Request],
    invalid: set[int],
    scheduled: dict[str, int],
    *,
    evict: bool,
) -> set[str]:
    """Set C of each request to the start of its first invalid block that nobody before it recomputes. Returns who is affected."""
    block_size, taken, affected = engine.settings.block_size, set[int](), set[str]()
    for request in requests if invalid else ():
        computed = request.num_computed_tokens - scheduled.get(request.request_id, 0)
        table = engine.kv_cache_manager.get_block_ids(request.request_id)[0]
        bad = [
            i
            for i, block_id in enumerate(table[: max(0, -(-computed // block_size))])
            if block_id in invalid
        ]
        own = [i for i in bad if table[i] not in taken]
        taken.update(table[i] for i in own)
        if bad:
            affected.add(request.request_id)
            request.num_computed_tokens = own[0] * block_size if own else computed
        if own and evict:
            engine.kv_cache_manager.block_pool.evict_blocks(table[own[0] :])
    return affected


def finished(engine: Engine, connector: KVConnectorBase_V1, reported: KVConnectorOutput) -> None:
    """Hand the report to the connector, then free or wake the requests in it. EngineAssertion for one that nobody waits for."""
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
                    f"finished_recving for {request_id}, which is {request.status.name} and loads nothing",
                )
