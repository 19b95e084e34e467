# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine around a step that lands: blocks that are freed too early, late outputs that count, and the order of an update."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request, RequestStatus

from kvconform.compat.vllm_api import FINISHED_ERROR
from kvconform.refimpl import output as landing
from kvconform.refimpl import scheduler, transfers
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.faulty import connector_of, fault, nothing


@fault(Engine, "frees_at_once")
def frees_under_a_step(frees: Any, engine: Engine, request: Request) -> bool:
    """Frees blocks at once although a step in flight writes to them."""
    return True


@fault(scheduler, "land")
def counts_late_outputs(land: Any, engine: Engine, output: Any, result: Any) -> Any:
    """Counts the tokens of a step from before a preemption as computed."""
    found = land(engine, output, result)
    for request_id in output.num_scheduled_tokens:
        request = engine.requests.get(request_id)
        if request is not None and request.status == RequestStatus.PREEMPTED:
            request.num_computed_tokens = output.num_scheduled_tokens[request_id]
    return found


@fault(scheduler, "land")
def gives_up_after_a_failed_load(land: Any, engine: Engine, output: Any, result: Any) -> Any:
    """Ends a request whose load has failed, whatever the policy."""
    before, engine.settings.recompute_failed_loads = engine.settings.recompute_failed_loads, False
    try:
        return land(engine, output, result)
    finally:
        engine.settings.recompute_failed_loads = before


@fault(Engine, "finish_requests")
def _fails_later(finish: Any, engine: Engine, ids: Any, status: RequestStatus) -> Any:
    """Ends requests whose load has failed after the connector has heard of the step's reports."""
    if status != FINISHED_ERROR or engine.__dict__.get("_told"):
        return finish(engine, ids, status)
    engine.__dict__["_failing"] = list(ids)
    return []


@_fails_later.and_(transfers, "finished")
def fails_after_the_reports(finished: Any, engine: Engine, connector: Any, reported: Any) -> None:
    finished(engine, connector, reported)
    engine.__dict__["_told"] = True
    engine.finish_requests(engine.__dict__.pop("_failing", []), FINISHED_ERROR)
    engine.__dict__["_told"] = False


@fault(scheduler, "land")
def reports_before_the_outputs(land: Any, engine: Engine, output: Any, result: Any) -> Any:
    """Tells the connector of a step's reports before the requests that the step ends are finished."""
    if engine.connector is not None and result.kv_connector_output:
        engine.connector.update_connector_output(result.kv_connector_output)
    with connector_of(engine, update_connector_output=nothing):
        return land(engine, output, result)


@fault(scheduler, "land")
def takes_events_before_statistics(land: Any, engine: Engine, output: Any, result: Any) -> Any:
    """Takes the events of an update before its statistics."""

    def after(original: Any) -> Any:
        list(connector.take_events() or ())
        return original()

    connector: Any = engine.connector
    with connector_of(engine, get_kv_connector_stats=after, take_events=nothing):
        return land(engine, output, result)


@fault(landing, "_append")
def closes_with_a_token(
    append: Any, engine: Engine, request: Request, sampled: list[int], is_stale: bool
) -> list[int]:
    """Puts a token of its own behind the last one of a request that ends, and counts it as computed."""
    found = list(append(engine, request, sampled, is_stale))
    if request.is_finished():
        request.append_output_token_ids(found[-1])
        request.num_computed_tokens += 1
    return found
