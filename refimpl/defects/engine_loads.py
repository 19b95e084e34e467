# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine: asynchronous loads that are over before there is room for their request."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request

from kvconform.refimpl.admission import LOADING
from kvconform.refimpl.defects import targets
from kvconform.refimpl.engine import Engine


@targets.ADMIT.replaced_by
def forgets_a_load_without_room(admit: Any, engine: Engine, step: Any, request: Request) -> Any:
    """Start a request over if there is no room for what its load leaves to compute."""
    outcome = admit(engine, step, request)
    if outcome == "stop":
        request.num_computed_tokens = 0
    return outcome


@targets.IS_READY.replaced_by
def forgets_a_report_without_room(is_ready: Any, engine: Engine, request: Request) -> bool:
    """Drop the report of a load if the rest of its request does not fit at that time."""
    missing = engine.kv_cache_manager.groups[0].missing(request.request_id, request.num_tokens)
    if (
        request.status == LOADING
        and missing > engine.kv_cache_manager.block_pool.get_num_free_blocks()
    ):
        engine.finished_recving_kv_req_ids.discard(request.request_id)
    return bool(is_ready(engine, request))
