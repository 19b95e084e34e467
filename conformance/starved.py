# SPDX-License-Identifier: Apache-2.0
"""A request that stands in its own way: its load failed, and vLLM still keeps blocks free for it."""

from __future__ import annotations

from typing import Any


def starved(scheduler: Any, request: Any, end: int, block_size: int) -> bool:
    """Whether an asynchronous load of positions up to `end` fits, but for what the engine has reserved for this request's failed load.

    vLLM's scheduler leaves a request whose load failed completely among the prefills in flight. Reads only; False where the engine
    reserves nothing, has several KV cache groups, or lacks blocks for another reason.
    """
    inflight = getattr(scheduler, "_inflight_prefills", ())
    manager = scheduler.kv_cache_manager
    if request not in inflight or any(tables := manager.get_block_ids(request.request_id)) or len(tables) != 1:
        return False
    remaining = scheduler._request_remaining_blocks
    verifying = getattr(scheduler, "_spec_decode_step_blocks", 0)
    verifying = verifying() if callable(verifying) else verifying  # a method until 0.31
    others = sum(remaining(other) for other in inflight if other is not request) + verifying
    spare = manager.block_pool.get_num_free_blocks() - others - -(-end // block_size)
    return bool(0 <= spare < remaining(request))
