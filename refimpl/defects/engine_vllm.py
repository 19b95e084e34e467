# SPDX-License-Identifier: Apache-2.0
"""Faults of vLLM's own scheduler (engine `vllm`): the guarantees are judged on its traces too."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kvconform.refimpl.faulty import fault


@fault(Scheduler, "_preempt_request")
def vllm_preempts_in_silence(
    preempt: Any, scheduler: Scheduler, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Does not name preempted requests in the output (B010)."""
    found = preempt(scheduler, request, *args, **kwargs)
    for name in ("reset_preempted_req_ids", "preempted_req_ids"):
        if hasattr(scheduler, name):
            getattr(scheduler, name).discard(request.request_id)
    return found


@fault(Scheduler, "_update_waiting_for_remote_kv")
def vllm_counts_loaded_blocks(
    update: Any, scheduler: Scheduler, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Takes whole blocks for loaded when a load ends within one (B037)."""
    found = update(scheduler, request, *args, **kwargs)
    table = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    request.num_computed_tokens = min(len(table) * scheduler.block_size, request.num_tokens - 1)
    return found


@fault(Scheduler, "reset_prefix_cache")
def vllm_resets_itself_only(
    reset: Any,
    scheduler: Scheduler,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> Any:
    """Resets its own prefix cache and forgets the connector's (B086)."""
    return reset(scheduler, reset_running_requests, False)


@fault(Scheduler, "finish_requests")
def vllm_frees_under_a_load(
    finish: Any, scheduler: Scheduler, request_ids: Any, status: RequestStatus
) -> Any:
    """Frees the blocks of a request that is aborted while its load is written into them (B045)."""
    ids = [request_ids] if isinstance(request_ids, str) else list(request_ids or ())
    loading = [
        i
        for i in ids
        if i in scheduler.requests
        and scheduler.requests[i].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    ]
    found = finish(scheduler, request_ids, status)
    for request_id in loading:
        if request_id in scheduler.requests:
            scheduler._free_blocks(scheduler.requests[request_id])
    return found
