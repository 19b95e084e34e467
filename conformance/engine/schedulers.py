# SPDX-License-Identifier: Apache-2.0
"""Builds the scheduler of an engine, and applies a case's policies to vLLM's own scheduler."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.stats import PrefixCacheStats

from kvconform.compat import vllm_api
from kvconform.contract.case import Variant


def configure_policies(
    config: Any, policies: frozenset[str], block_size: int, draft_tokens: int
) -> None:
    """Apply the policies that are configuration.

    split-prefill makes chunks shorter than a block, but not shorter than a verification: vLLM
    asserts that.
    """
    if "split-prefill" in policies:
        threshold = max(1, block_size - 1, draft_tokens + 1)
        config.scheduler_config.long_prefill_token_threshold = threshold


def apply_policies(scheduler: Any, policies: frozenset[str]) -> None:
    """Patch one vLLM scheduler so that it follows the policies. Changes that instance only."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    if "reuse-freed-first" in policies:
        vllm_api.reuse_freed_first(pool.free_block_queue)
    if "permute-blocks" in policies:
        get_new_blocks = pool.get_new_blocks
        pool.get_new_blocks = lambda count: list(reversed(get_new_blocks(count)))
    if "deny-first-alloc" in policies:
        _deny_first(scheduler, manager)
    if "ignore-hits" in policies:
        add_request = scheduler.add_request

        def add(request: Any) -> None:
            request.skip_reading_prefix_cache = True
            add_request(request)

        scheduler.add_request = add


def _deny_first(scheduler: Any, manager: Any) -> None:
    allocate = manager.allocate_slots
    denied = set()

    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        key = (request.request_id, id(request))
        starts = request not in scheduler.running and request.num_computed_tokens == 0
        if starts and key not in denied:
            denied.add(key)
            return None
        return allocate(request, *args, **kwargs)

    manager.allocate_slots = allocate_slots


def build_scheduler(variant: Variant, config: Any, cache: Any, *, with_connector: bool) -> Any:
    """Return the scheduler of the variant's engine.

    vLLM's scheduler constructs the scheduler half of the connector; the reference engine's is given
    one.
    """
    wanted = frozenset(variant.case.policies)
    if variant.engine == "reference":
        from kvconform.refimpl.scheduler import ReferenceScheduler

        connector = None
        if with_connector:
            connector = vllm_api.KVConnectorFactory.create_connector(
                config=config, role=vllm_api.KVConnectorRole.SCHEDULER, kv_cache_config=cache
            )
        scheduler: Any = ReferenceScheduler(
            config,
            cache,
            connector,
            block_size=variant.block_size,
            async_scheduling=variant.scheduling == "async",
            runner=variant.runner,
            policies=wanted,
        )
        if variant.case.config.stats and with_connector:
            scheduler.connector_prefix_cache_stats = PrefixCacheStats()
        _use_blocks(scheduler, variant.case.config.used_blocks)
        return scheduler
    scheduler = vllm_api.build_scheduler(
        config,
        cache,
        block_size=variant.block_size,
        scheduling=variant.scheduling,
        runner=variant.runner,
        stats=variant.case.config.stats,
    )
    _use_blocks(scheduler, variant.case.config.used_blocks)
    apply_policies(scheduler, wanted)
    return scheduler


def _use_blocks(scheduler: Any, count: int) -> None:
    """Let so many blocks have been in use, one after the other: they are reused last."""
    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    if count:
        queue.append_n(queue.popleft_n(count))
