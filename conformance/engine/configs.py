# SPDX-License-Identifier: Apache-2.0
"""Builds the parts of an engine in the order in which vLLM does: worker half first, then the scheduler with its half.

The reference engine's policies, done to vLLM's own scheduler where its code allows it: legal things that nothing announces.

Copies of vLLM configurations that were made before: making one takes twenty milliseconds, which is longer than many a run.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm.v1.metrics.stats import PrefixCacheStats

from kvconform.compat import groups, vllm_api
from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.kv.cache import PagedCache
from kvconform.kv.provenance import text_id
from kvconform.refimpl import faulty


def prepare(config: Any, policies: frozenset[str], block_size: int, draft_tokens: int) -> None:
    """Policies that are configuration: split-prefill makes chunks shorter than a block, but not than a verification (vLLM asserts)."""
    if "split-prefill" in policies:
        config.scheduler_config.long_prefill_token_threshold = max(
            1, block_size - 1, draft_tokens + 1
        )


def apply(scheduler: Any, policies: frozenset[str]) -> frozenset[str]:
    """Patch one vLLM scheduler; returns the policies that are in force. Changes the scheduler's instance only."""
    manager, applied = scheduler.kv_cache_manager, set(policies & {"split-prefill"})
    pool = manager.block_pool
    if "reuse-freed-first" in policies:
        vllm_api.reuse_freed_first(pool.free_block_queue)
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
        if (
            request not in scheduler.running
            and request.num_computed_tokens == 0
            and key not in denied
        ):
            denied.add(key)
            return None
        return allocate(request, *args, **kwargs)

    manager.allocate_slots = allocate_slots


MOST = 256
"""Configurations that are kept."""
_configs: dict[Hashable, Any] = {}
_transfers: dict[Hashable, Any] = {}
_ATOMS = frozenset({str, int, float, bool, type(None), bytes, tuple})


def cached_config(key: Hashable, transfer: Any, make: Callable[[], Any]) -> Any:
    """`make()`, or a copy of what it made for an equal `key`, with this kv_transfer_config. Nothing of it is shared with other copies
    that anybody can change in place: it may be kept, and changed, as if it were made anew. While a fault is planted in vLLM's own code,
    nothing is taken from what was made without it, nor kept."""
    if faulty.in_force():
        return make()
    if key not in _configs:
        made = make()
        while len(_configs) >= MOST:
            del _configs[next(iter(_configs))]
        _configs[key] = _copied(made, {})
        return made
    found = _copied(_configs[key], {})
    found.kv_transfer_config = transfer
    found.instance_id = str(time.time_ns())
    return found


def cached_transfer_config(
    key: Hashable, extra: dict[str, Any], engine_id: str, make: Callable[[], Any]
) -> Any:
    """As `cached_config`, of a kv_transfer_config: what `make()` made for an equal `key`, with these options and this id."""
    if faulty.in_force():
        return make()
    if key not in _transfers:
        while len(_transfers) >= MOST:
            del _transfers[next(iter(_transfers))]
        _transfers[key] = make()
    found = copy.copy(_transfers[key])
    found.kv_connector_extra_config, found.engine_id = dict(extra), engine_id
    return found


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy that goes as deep as lists, dicts, sets and configurations do. An object that is there twice is there twice in the copy."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, (str, int, float, bytes, tuple, Enum)):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind in (dict, list, set):
        found: Any = kind(value)
        memo[id(value)] = found
        if kind is dict:
            for name, each in value.items():
                found[name] = _copied(each, memo)
        elif kind is list:
            found[:] = [_copied(each, memo) for each in value]
        return found
    if isinstance(value, (dict, list, set)):  # a counter
        memo[id(value)] = found = copy.copy(value)
        return found
    if not kind.__module__.startswith(
        ("vllm.config.", "vllm.transformers_utils.", "transformers.")
    ) or not hasattr(value, "__dict__"):
        return value
    memo[id(value)] = found = object.__new__(kind)
    fields = dict(vars(value))
    for name, each in fields.items():
        if type(each) not in _ATOMS:
            fields[name] = _copied(each, memo)
    vars(found).update(fields)
    return found


LAYERS, HEADS, HEAD_DIM = 2, 2, 16
MODEL = "kvconform/tiny-model"


@lru_cache(maxsize=4)
def run_id(tmp: Path) -> str:
    """16 hex digits that no other run has."""
    return f"{text_id(str(tmp)):016x}"


def build_config(variant: Variant, target: Target, tmp: Path, *, with_connector: bool) -> Any:
    """The VllmConfig of a variant."""
    settings = variant.case.config
    transfer = None
    if with_connector:
        role, options = target.role or settings.role, target.options(tmp, variant.block_size)
        engine_id = f"kvconform-{variant.case.id}-{run_id(tmp)}{settings.suffix}"  # one per run: stores in memory go by it
        transfer = cached_transfer_config(
            (target.name, role, target.module, settings.load_failure_policy),
            options,
            engine_id,
            lambda: vllm_api.transfer_config(
                target.name, role, options, target.module, settings.load_failure_policy, engine_id
            ),
        )
    arguments: dict[str, Any] = dict(
        block_size=variant.block_size // (settings.context_parallel if with_connector else 1),
        num_blocks=settings.num_blocks,
        budget=settings.budget,
        max_seqs=settings.max_seqs,
        max_model_len=settings.max_model_len,
        prefix_caching=settings.prefix_caching,
        spec_tokens=settings.spec_tokens,
        scheduling=variant.scheduling,
        runner=variant.runner,
        policy="priority"
        if any(s.op == "add" and s.arg.priority for s in variant.case.steps)
        else "fcfs",
    )
    whose = (
        (
            target.resolve(),
            target.device,
            target.role or settings.role,
            settings.load_failure_policy,
        )
        if with_connector
        else ()
    )
    key = (
        *arguments.values(),
        tuple(settings.multi),
        *whose,
        *(map(repr, (target.extra_config, target.adapters)) if with_connector else ()),
    )
    config = cached_config(
        key, transfer, lambda: vllm_api.build_config(**arguments, transfer=transfer)
    )
    _say_sizes(config, latent=settings.groups == ["latent"])
    config.model_config.model = (
        MODEL  # a path would differ from machine to machine, and connectors derive keys from it
    )
    config.scheduler_config.long_prefill_token_threshold = settings.long_prefill_threshold
    prepare(config, frozenset(variant.case.policies), variant.block_size, settings.spec_tokens)
    if settings.groups == ["latent"]:
        groups.make_latent(config)
    if "state" in settings.groups:
        groups.make_recurrent(config)
    if len(settings.groups) > 1:
        config.scheduler_config.disable_hybrid_kv_cache_manager = (
            False  # vLLM does not start a connector that does not support it
        )
    return config


def _say_sizes(config: Any, *, latent: bool) -> None:
    """Let the model configuration say how wide the cache is: connectors allocate by it. (vLLM's own check wants larger heads.)"""
    heads, size = (1, 2 * HEAD_DIM) if latent else (HEADS, HEAD_DIM)
    text = config.model_config.hf_text_config
    text.num_key_value_heads, text.head_dim = heads, size
    if hasattr(config.model_config, "model_arch_config"):  # since 0.14 or so a copy of these
        found = config.model_config.model_arch_config
        found.total_num_kv_heads, found.head_size = heads, size


def build_cache_config(cache: PagedCache) -> Any:
    """The KVCacheConfig of `cache`."""
    if (
        len(cache.groups) > 1
        or cache.groups[0].kind != "full"
        or cache.layout != vllm_api.KV_LAYOUT
    ):
        return groups.build_cache_config(cache)
    return vllm_api.build_cache_config(
        cache.num_blocks, cache.block_size, cache.book.heads, cache.book.head_dim, cache.names
    )


def build_scheduler(
    variant: Variant, config: Any, cache: Any, *, with_connector: bool
) -> tuple[Any, frozenset[str]]:
    """The scheduler of the variant's engine, which constructs (or is given) the scheduler half of the connector."""
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
        return scheduler, wanted
    scheduler = vllm_api.build_scheduler(
        config,
        cache,
        block_size=variant.block_size,
        scheduling=variant.scheduling,
        runner=variant.runner,
        stats=variant.case.config.stats,
    )
    return scheduler, apply(scheduler, wanted)
