# SPDX-License-Identifier: Apache-2.0
"""Builds the vLLM configurations of an engine. They are cached: building one can outlast a run."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kvconform.compat import groups, vllm_api
from kvconform.config.target import Target
from kvconform.contract.case import Config, Variant
from kvconform.contract.steps import ONE_BYTE
from kvconform.engine.schedulers import configure_policies
from kvconform.kv.cache import PagedCache
from kvconform.kv.provenance import text_id
from kvconform.refimpl import faulty

MOST = 256
"""Most configurations that are cached."""
_configs: dict[Hashable, Any] = {}
_transfers: dict[Hashable, Any] = {}
_ATOMS = frozenset({str, int, float, bool, type(None), bytes, tuple})
_COPIED_MODULES = ("vllm.config.", "vllm.transformers_utils.", "transformers.")
"""Modules whose objects are configurations."""


def cached_config(key: Hashable, transfer: Any, make: Callable[[], Any]) -> Any:
    """Return a private copy of the VllmConfig cached under `key`; `make` builds it the first time.

    The copy has `transfer` as its kv_transfer_config. It shares nothing with other copies that can
    be changed in place. While a fault is planted in vLLM's own code, the cache is not used.
    """
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
    """Return a copy of the kv_transfer_config cached under `key`; `make` builds it the first time.

    The copy has the options `extra` and the id `engine_id`. While a fault is planted, the cache is
    not used.
    """
    if faulty.in_force():
        return make()
    if key not in _transfers:
        while len(_transfers) >= MOST:
            del _transfers[next(iter(_transfers))]
        _transfers[key] = make()
    found = copy.copy(_transfers[key])
    found.kv_connector_extra_config = dict(extra)
    found.engine_id = engine_id
    return found


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy that is as deep as lists, dicts, sets and configurations go.

    An object that occurs twice occurs twice in the copy: `memo` maps the ids of objects to copies.
    """
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
    if not kind.__module__.startswith(_COPIED_MODULES) or not hasattr(value, "__dict__"):
        return value
    memo[id(value)] = found = object.__new__(kind)
    fields = dict(vars(value))
    for name, each in fields.items():
        if type(each) not in _ATOMS:
            fields[name] = _copied(each, memo)
    vars(found).update(fields)
    return found


LAYERS, HEADS, HEAD_DIM = 2, 2, 16
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Data types of models by name; all of them represent the codes exactly."""
CACHE_DTYPES = {**DTYPES, **dict.fromkeys(ONE_BYTE, torch.uint8)}
"""Those of KV caches. The tensors of a quantised cache have bytes, as vLLM's do."""


def kv_dtype(settings: Config) -> torch.dtype:
    """Return the data type of the KV cache: its own, or that of the model."""
    own = settings.cache_dtype
    return CACHE_DTYPES[settings.dtype if own == "auto" else own]


@lru_cache(maxsize=4)
def run_id(tmp: Path) -> str:
    """Return 16 hex digits that no other run has."""
    return f"{text_id(str(tmp)):016x}"


def engine_id_of(variant: Variant, tmp: Path) -> str:
    """Return the id of a run's engine. Connectors that store in memory use it as a key."""
    return f"kvconform-{variant.case.id}-{run_id(tmp)}{variant.case.config.suffix}"


def build_config(variant: Variant, target: Target, tmp: Path, *, with_connector: bool) -> Any:
    """Return the VllmConfig of a variant."""
    settings = variant.case.config
    transfer = None
    if with_connector:
        role = target.role or settings.role
        options = target.options(tmp, variant.block_size)
        engine_id = engine_id_of(variant, tmp)
        transfer = cached_transfer_config(
            (target.name, role, target.module, settings.load_failure_policy),
            options,
            engine_id,
            lambda: vllm_api.transfer_config(
                target.name, role, options, target.module, settings.load_failure_policy, engine_id
            ),
        )
    prioritised = any(step.op == "add" and step.arg.priority for step in variant.case.steps)
    sizes: dict[str, Any] = dict(
        block_size=variant.block_size // (settings.context_parallel if with_connector else 1),
        num_blocks=settings.num_blocks,
        scheduling=variant.scheduling,
    )
    arguments: dict[str, Any] = dict(
        budget=settings.budget,
        max_seqs=min(settings.max_seqs, settings.budget),  # vLLM wants a token for each
        max_model_len=settings.max_model_len,
        prefix_caching=settings.prefix_caching,
        kv_events=settings.kv_events,
        spec_tokens=settings.spec_tokens,
        policy="priority" if prioritised else "fcfs",
    )
    key: tuple[Hashable, ...] = (*arguments.values(), tuple(settings.multi))
    if with_connector:
        key += (
            target.resolve(),
            target.device,
            target.role or settings.role,
            settings.load_failure_policy,
            repr(target.extra_config),
            repr(target.adapters),
        )
    config = cached_config(
        key, transfer, lambda: vllm_api.build_config(**sizes, **arguments, transfer=transfer)
    )
    vllm_api.resize(config, **sizes)
    _say_sizes(config, settings.hidden_layers, latent=settings.groups == ["latent"])
    config.model_config.dtype = DTYPES[settings.dtype]
    config.cache_config.cache_dtype = settings.cache_dtype
    if settings.drafter:
        groups.make_mtp(config)
    # A path would differ from machine to machine, and connectors derive keys from it.
    config.model_config.model = config.model_config.served_model_name = settings.model
    config.model_config.revision = settings.revision
    config.model_config.quantization = settings.quantization
    config.model_config.hf_overrides = settings.hf_overrides
    if settings.pooling:
        config.model_config.runner_type = "pooling"
    config.scheduler_config.long_prefill_token_threshold = settings.long_prefill_threshold
    configure_policies(
        config, frozenset(variant.case.policies), variant.block_size, settings.spec_tokens
    )
    if settings.groups == ["latent"]:
        groups.make_latent(config)
    if "state" in settings.groups:
        groups.make_recurrent(config)
    if "local" in settings.groups:
        groups.make_local(config, settings.window)
    if settings.prefix_match_unit is not None:
        config.cache_config.prefix_match_unit = settings.prefix_match_unit
    if hasattr(config.cache_config, "prefix_cache_retention_interval"):
        config.cache_config.prefix_cache_retention_interval = settings.retention_interval
    if len(settings.groups) > 1:
        # vLLM does not start a connector that does not support several groups.
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return config


def _say_sizes(config: Any, layers: int, *, latent: bool) -> None:
    """Put the cache's sizes into the model configuration; connectors allocate by it.

    These are its heads, their size, and the number of layers, without the drafter's.

    vLLM's own check of the configuration wants larger heads.
    """
    heads, size = (1, 2 * HEAD_DIM) if latent else (HEADS, HEAD_DIM)
    text = config.model_config.hf_text_config
    text.num_key_value_heads = heads
    text.head_dim = size
    text.num_hidden_layers = layers
    if hasattr(config.model_config, "model_arch_config"):  # since 0.14 or so a copy of these
        found = config.model_config.model_arch_config
        found.total_num_kv_heads = heads
        found.head_size = size
        found.total_num_hidden_layers = layers


def build_cache_config(cache: PagedCache) -> Any:
    """Return the KVCacheConfig of `cache`."""
    one_full_group = len(cache.groups) == 1 and cache.groups[0].kind == "full"
    plain = one_full_group and cache.drafter is None and not cache.groups[0].narrow
    if not plain or cache.layout != vllm_api.KV_LAYOUT:
        return groups.build_cache_config(cache)
    return vllm_api.build_cache_config(
        cache.num_blocks,
        cache.block_size,
        cache.book.heads,
        cache.book.head_dim,
        cache.names,
        cache.dtype,
    )
