# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine when a step lands: early frees, late outputs, the order of the update."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from vllm.v1.request import Request, RequestStatus

from kvconform.compat.vllm_api import FINISHED_ERROR
from kvconform.refimpl.defects import targets
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.faulty import connector_of, returns, skipped

frees_under_a_step = targets.FREES_AT_ONCE.replaced_by(returns(True))
"""Free blocks at once although a step in flight writes to them."""


@targets.LAND.after
def counts_late_outputs(_: Any, engine: Engine, output: Any, result: Any) -> None:
    """Count the tokens of a step from before a preemption as computed."""
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = engine.requests.get(request_id)
        if request is not None and request.status == RequestStatus.PREEMPTED:
            request.num_computed_tokens = tokens


@targets.LAND.replaced_by
def gives_up_after_a_failed_load(land: Any, engine: Engine, output: Any, result: Any) -> Any:
    """End a request whose load has failed, whatever the policy."""
    with patch.object(engine.settings, "recompute_failed_loads", False):
        return land(engine, output, result)


@targets.FINISH_REQUESTS.replaced_by
def _fails_later(finish: Any, engine: Engine, ids: Any, status: RequestStatus) -> Any:
    if status != FINISHED_ERROR or engine.__dict__.get("_reported"):
        return finish(engine, ids, status)
    engine.__dict__["_failing"] = list(ids)
    return []


@targets.FINISHED.after
def _fails_now(_: None, engine: Engine, connector: Any, reported: Any) -> None:
    engine.__dict__["_reported"] = True
    engine.finish_requests(engine.__dict__.pop("_failing", []), FINISHED_ERROR)
    engine.__dict__["_reported"] = False


fails_after_the_reports = _fails_later + _fails_now
"""End requests whose load has failed after the connector was given the step's reports."""


@targets.LAND.replaced_by
def reports_before_the_outputs(land: Any, engine: Engine, output: Any, result: Any) -> Any:
    """Report to the connector before the requests that the step ends are finished."""
    if engine.connector is not None and result.kv_connector_output:
        engine.connector.update_connector_output(result.kv_connector_output)
    with connector_of(engine, update_connector_output=skipped):
        return land(engine, output, result)


@targets.LAND.replaced_by
def takes_events_before_statistics(land: Any, engine: Engine, output: Any, result: Any) -> Any:
    """Take the events of an update before its statistics."""
    connector: Any = engine.connector

    def after_events(original: Any) -> Any:
        list(connector.take_events() or ())
        return original()

    with connector_of(engine, get_kv_connector_stats=after_events, take_events=skipped):
        return land(engine, output, result)


@targets.APPEND.after
def closes_with_a_token(
    found: list[int], engine: Engine, request: Request, sampled: list[int], is_stale: bool
) -> None:
    """Append a token of the engine's own to a request that ends, and count it as computed."""
    if request.is_finished():
        request.append_output_token_ids(found[-1])
        request.num_computed_tokens += 1
