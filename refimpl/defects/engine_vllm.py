# SPDX-License-Identifier: Apache-2.0
"""Faults of vLLM's own scheduler (engine `vllm`), whose traces the guarantees judge too."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kvconform.refimpl.faulty import Target, with_keywords

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

vllm_resets_itself_only = Target(f"{SCHEDULER}.reset_prefix_cache").replaced_by(
    with_keywords(reset_connector=False)
)
"""Reset the prefix cache, but not the connector's cache (B086)."""


@Target(f"{SCHEDULER}._preempt_request").after
def vllm_preempts_in_silence(
    _: Any, scheduler: Scheduler, request: Any, *args: Any, **kwargs: Any
) -> None:
    """Do not name preempted requests in the output (B010)."""
    for name in ("reset_preempted_req_ids", "preempted_req_ids"):
        if hasattr(scheduler, name):
            getattr(scheduler, name).discard(request.request_id)


@Target(f"{SCHEDULER}._update_waiting_for_remote_kv").after
def vllm_counts_loaded_blocks(
    _: Any, scheduler: Scheduler, request: Any, *args: Any, **kwargs: Any
) -> None:
    """Count whole blocks as loaded when a load ends within a block (B037)."""
    table = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    request.num_computed_tokens = min(len(table) * scheduler.block_size, request.num_tokens - 1)


@Target(f"{SCHEDULER}.finish_requests").replaced_by
def vllm_frees_under_a_load(
    finish: Any, scheduler: Scheduler, request_ids: Any, status: RequestStatus
) -> Any:
    """Free the blocks of an aborted request while its load is written into them (B045)."""
    ids = [request_ids] if isinstance(request_ids, str) else list(request_ids or ())
    requests = scheduler.requests
    loading = [
        i
        for i in ids
        if i in requests and requests[i].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    ]
    found = finish(scheduler, request_ids, status)
    for request_id in loading:
        if request_id in requests:
            scheduler._free_blocks(requests[request_id])
    return found


@Target(f"{SCHEDULER}._request_blocks_can_be_freed").replaced_by
def vllm_frees_under_a_step(freed: Any, scheduler: Scheduler, request: Any) -> bool:
    """Free blocks at once although a step in flight writes to them (B134)."""
    return True


@Target("vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots").replaced_by
def vllm_advances_windows_early(
    allocate: Any, manager: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Free what has left a window although a step in flight still uses it (B154)."""
    with patch.object(request, "num_in_flight_tokens", 0):
        return allocate(manager, request, *args, **kwargs)


@Target(f"{SCHEDULER}._update_request_as_session").after
def vllm_forgets_sessions(_: None, scheduler: Scheduler, session: Any, more: Any) -> None:
    """Take a session out of the waiting queues when it gets more input."""
    for queue in (scheduler.kv_holding_waiting, scheduler.waiting):
        queue.remove_requests({session})


@Target(f"{SCHEDULER}._handle_stopped_request").after
def vllm_counts_the_last_token(is_over: bool, _: Scheduler, request: Any) -> None:
    """Count the token that ends a turn of a session as computed."""
    if not is_over:
        request.num_computed_tokens = request.num_tokens
