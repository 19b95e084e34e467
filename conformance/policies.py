# SPDX-License-Identifier: Apache-2.0
"""The reference engine's policies, done to vLLM's own scheduler where its code allows it: legal things that nothing announces."""

from __future__ import annotations

from typing import Any

from kvconform import compat


def prepare(config: Any, policies: frozenset[str], block_size: int, draft_tokens: int) -> None:
    """Policies that are configuration: split-prefill makes chunks shorter than a block, but not than a verification (vLLM asserts)."""
    if "split-prefill" in policies:
        config.scheduler_config.long_prefill_token_threshold = max(1, block_size - 1, draft_tokens + 1)


def apply(scheduler: Any, policies: frozenset[str]) -> frozenset[str]:
    """Patch one vLLM scheduler; returns the policies that are in force. Changes the scheduler's instance only."""
    manager, applied = scheduler.kv_cache_manager, set(policies & {"split-prefill"})
    pool = manager.block_pool
    if "reuse-freed-first" in policies:
        compat.reuse_freed_first(pool.free_block_queue)
        applied.add("reuse-freed-first")
    if "permute-blocks" in policies:
        get_new_blocks = pool.get_new_blocks
        pool.get_new_blocks = lambda count: list(reversed(get_new_blocks(count)))
        applied.add("permute-blocks")
    if "deny-first-alloc" in policies:
        _deny_first(scheduler, manager)
        applied.add("deny-first-alloc")
    if "ignore-hits" in policies:
        add_request = scheduler.add_request

        def add(request: Any) -> None:
            request.skip_reading_prefix_cache = True
            add_request(request)

        scheduler.add_request = add
        applied.add("ignore-hits")
    return frozenset(applied)


def _deny_first(scheduler: Any, manager: Any) -> None:
    allocate, denied = manager.allocate_slots, set()

    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        key = (request.request_id, id(request))
        if request not in scheduler.running and request.num_computed_tokens == 0 and key not in denied:
            denied.add(key)
            return None
        return allocate(request, *args, **kwargs)

    manager.allocate_slots = allocate_slots
