# SPDX-License-Identifier: Apache-2.0
"""Builds the parts of an engine in the order in which vLLM does: worker half first, then the scheduler with its half."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm.v1.metrics.stats import PrefixCacheStats

from kvconform import compat, compat_groups, policies, templates
from kvconform.case import Variant
from kvconform.kvcache import PagedCache
from kvconform.provenance import text_id
from kvconform.target import Target

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
        transfer = templates.transfer(
            (target.name, role, target.module, settings.load_failure_policy),
            options,
            engine_id,
            lambda: compat.transfer_config(target.name, role, options, target.module, settings.load_failure_policy, engine_id),
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
        policy="priority" if any(s.op == "add" and s.arg.priority for s in variant.case.steps) else "fcfs",
    )
    whose = (target.resolve(), target.device, target.role or settings.role, settings.load_failure_policy) if with_connector else ()
    key = (
        *arguments.values(),
        tuple(settings.multi),
        *whose,
        *(map(repr, (target.extra_config, target.adapters)) if with_connector else ()),
    )
    config = templates.configuration(key, transfer, lambda: compat.build_config(**arguments, transfer=transfer))
    _say_sizes(config, latent=settings.groups == ["latent"])
    config.model_config.model = MODEL  # a path would differ from machine to machine, and connectors derive keys from it
    config.scheduler_config.long_prefill_token_threshold = settings.long_prefill_threshold
    policies.prepare(config, frozenset(variant.case.policies), variant.block_size, settings.spec_tokens)
    if settings.groups == ["latent"]:
        compat_groups.make_latent(config)
    if "state" in settings.groups:
        compat_groups.make_recurrent(config)
    if len(settings.groups) > 1:
        config.scheduler_config.disable_hybrid_kv_cache_manager = False  # vLLM does not start a connector that does not support it
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
    if len(cache.groups) > 1 or cache.groups[0].kind != "full" or cache.layout != compat.KV_LAYOUT:
        return compat_groups.build_cache_config(cache)
    return compat.build_cache_config(cache.num_blocks, cache.block_size, cache.book.heads, cache.book.head_dim, cache.names)


def build_scheduler(variant: Variant, config: Any, cache: Any, *, with_connector: bool) -> tuple[Any, frozenset[str]]:
    """The scheduler of the variant's engine, which constructs (or is given) the scheduler half of the connector."""
    wanted = frozenset(variant.case.policies)
    if variant.engine == "reference":
        from kvconform.refimpl.scheduler import ReferenceScheduler

        connector = None
        if with_connector:
            connector = compat.KVConnectorFactory.create_connector(
                config=config, role=compat.KVConnectorRole.SCHEDULER, kv_cache_config=cache
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
    scheduler = compat.build_scheduler(
        config, cache, block_size=variant.block_size, scheduling=variant.scheduling, runner=variant.runner, stats=variant.case.config.stats
    )
    return scheduler, policies.apply(scheduler, wanted)
