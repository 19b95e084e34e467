# SPDX-License-Identifier: Apache-2.0
"""The shape of the KV cache in the installed vLLM: groups, MLA, and the memory order of axes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields, replace
from enum import Enum
from typing import Any

from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends import utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvconform.compat.attention import bound
from kvconform.compat.vllm_api import KV_LAYOUT, KVConnectorFactory, torch
from kvconform.kv.cache import Group, PagedCache

RESOLVES_LAYOUTS = hasattr(utils, "resolve_kv_cache_layout")
"""Whether the engine core resolves the layout, which the connector may restrict (since 0.31)."""
LAYOUTS = ("LBHNC", "LBNHC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
_ALIASES = {"HND": "LBHNC", "NHD": "LBNHC"}
ITEM = 4
"""Bytes of a float32."""
_KIND = next(field.default for field in fields(MambaSpec) if field.name == "mamba_type")
MAMBA1: Any = type(_KIND)["MAMBA1"] if isinstance(_KIND, Enum) else "mamba1"
"""The kind of the recurrent layers: a convolution state and a second state, each (channels, 1)."""


def resolve_layout(config: Any, only: str | None) -> str:
    """Let vLLM resolve the layout, as the connector's class requires, and return its name.

    `only`: the one layout to choose from, instead of all. Changes `config`. Raises what vLLM
    raises. The name is one of kvconform.kv.cache.
    """
    if not RESOLVES_LAYOUTS:
        return KV_LAYOUT
    config.cache_config.kv_cache_layout = None
    return str(utils.resolve_kv_cache_layout(config, [[only] if only else list(LAYOUTS)]).name)


def knows_layout(name: str) -> bool:
    """Return whether vLLM has a layout of this name."""
    return not RESOLVES_LAYOUTS or _ALIASES.get(name, name) in LAYOUTS


def make_recurrent(config: Any) -> None:
    """Let vLLM keep recurrent states at the ends of blocks, so that they can be shared.

    Changes `config`.
    """
    config.cache_config.mamba_cache_mode = "align"
    config.cache_config.mamba_block_size = config.cache_config.block_size


def make_latent(config: Any) -> None:
    """Mark the model in `config` as one that uses MLA. Changes `config`."""
    config.model_config.model_arch_config.is_deepseek_mla = True


def make_local(config: Any, chunk: int) -> None:
    """Let some layers of the model in `config` attend to chunks of so many tokens, as Llama 4's.

    Changes `config`.
    """
    model = config.model_config
    model.attention_chunk_size = model.hf_text_config.attention_chunk_size = chunk


def make_mtp(config: Any) -> None:
    """Let the drafter of `config` be layers of the model that predict later tokens (MTP).

    vLLM then takes the last block of a local hit for too uncertain, and recomputes it. The drafter
    has one layer. Changes `config`.
    """
    config.speculative_config.method = "mtp"
    draft = copy.copy(config.model_config)
    if hasattr(draft, "model_arch_config"):
        draft.model_arch_config = copy.copy(draft.model_arch_config)
        draft.model_arch_config.total_num_hidden_layers = 1
    else:
        draft.hf_text_config = copy.copy(draft.hf_text_config)
        draft.hf_text_config.num_hidden_layers = 1
    config.speculative_config.draft_model_config = draft


def _spec(group: Group, head_dim: int, heads: int, dtype: torch.dtype, drafts: int) -> Any:
    """Return the KVCacheSpec of a group; `heads`: of the model, `drafts`: of a step."""
    shape: dict[str, Any] = dict(
        block_size=group.block_size,
        num_kv_heads=group.heads,
        head_size=head_dim,
        dtype=dtype,
    )
    if group.recurrent:
        page = heads * group.block_size * 2 * head_dim * ITEM
        state = dict(
            shapes=((head_dim, 1),) * 2,
            dtypes=(torch.float32,) * 2,
            mamba_cache_mode="align",
            page_size_padded=page,
            num_speculative_blocks=drafts,
        )
        return MambaSpec(block_size=group.block_size, mamba_type=MAMBA1, **state)
    if group.kind == "latent":
        return MLAAttentionSpec(**{**shape, "head_size": 2 * head_dim})
    if group.window is None:
        return FullAttentionSpec(**shape)
    if group.kind == "local":
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=group.window)
    return SlidingWindowSpec(**shape, sliding_window=group.window)


def bound_tensors(cache: PagedCache) -> dict[str, torch.Tensor]:
    """Return what the layers of the model bind of their registered tensors, by name."""
    return {
        name: bound(tensor, latent=cache.groups[cache.group(layer)].kind == "latent")
        for layer, (name, tensor) in enumerate(zip(cache.names, cache.tensors, strict=True))
    }


def build_cache_config(cache: PagedCache) -> KVCacheConfig:
    """Return the KVCacheConfig of a cache; layers of different groups share the same bytes."""
    names = [[cache.names[layer] for layer in group.layers] for group in cache.groups]
    book, dtype = cache.book, cache.dtype
    shape = book.head_dim, book.heads, dtype, cache.drafts
    specs = [_spec(group, *shape) for group in cache.registered]
    page, depth = specs[0].page_size_bytes, max(map(len, names))
    if cache.groups[0].narrow:
        ones = _one_by_one(cache.registered[0])
        own = [_spec(one, *shape) for one in ones]
        each = dict(zip(names[0], own, strict=True))
        specs = [UniformTypeKVCacheSpecs(block_size=cache.block_size, kv_cache_specs=each)]
        tensors = [
            _of_layer(cache, one, spec.page_size_bytes * cache.num_blocks)
            for one, spec in zip(ones, own, strict=True)
        ]
    elif "layers" in KVCacheTensor.__dataclass_fields__:  # since 0.31
        tensors = [_placed(cache, group, page * cache.num_blocks) for group in cache.groups]
    else:
        shared = [
            [layers[index] for layers in names if index < len(layers)] for index in range(depth)
        ]
        tensors = [
            KVCacheTensor(size=page * cache.num_blocks, shared_by=layers) for layers in shared
        ]
    groups = []
    for layers, spec, group in zip(names, specs, cache.groups, strict=True):
        made = KVCacheGroupSpec(layers, spec)
        if hasattr(made, "enable_kv_transfer"):
            made.enable_kv_transfer = group.transfer
        if hasattr(made, "is_eagle_group"):
            made.is_eagle_group = cache.drafter in group.layers
        groups.append(made)
    config = KVCacheConfig(
        num_blocks=cache.num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups
    )
    if hasattr(config, "hash_block_size"):
        config.hash_block_size = cache.hash_size
    if hasattr(config, "prefix_cache_retention_interval"):
        config.prefix_cache_retention_interval = cache.retention_interval
    if hasattr(config, "kv_cache_layout"):
        config.kv_cache_layout = cache.layout
    return config


def _one_by_one(group: Group) -> list[Group]:
    """Return a group of its own for each layer of a group, with the heads of that layer."""
    return [
        replace(group, layers=(layer,), heads=group.heads_of(layer), narrow=frozenset())
        for layer in group.layers
    ]


def _of_layer(cache: PagedCache, alone: Group, region: int) -> KVCacheTensor:
    """Return where one layer lies in the memory of all; `region`: bytes of that layer."""
    [layer] = alone.layers
    if "layers" not in KVCacheTensor.__dataclass_fields__:
        return KVCacheTensor(size=region, shared_by=[cache.names[layer]])
    tensor = cache.tensors[layer]
    return replace(
        _placed(cache, alone, region),
        size=tensor.untyped_storage().nbytes(),
        offset=tensor.storage_offset() * tensor.element_size(),
    )


def of_scheduler(cache_config: KVCacheConfig) -> KVCacheConfig:
    """Return the KVCacheConfig of the scheduler: each group has the spec of its first layer."""
    uniform = any(
        isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
        for group in cache_config.kv_cache_groups
    )
    if not uniform:
        return cache_config
    return kv_cache_utils.generate_scheduler_kv_cache_config([cache_config])


def resolve_hits(config: Any, cache_configs: Sequence[KVCacheConfig]) -> None:
    """Say how many tokens a block hash has, and at multiples of how many tokens hits may end.

    The engine core does it before it constructs a connector, and puts both into the configurations
    of the scheduler and of all workers (v1/engine/core.py: EngineCore._initialize_kv_caches).
    Changes the configurations; nothing before vLLM 0.32.
    """
    resolve = getattr(kv_cache_utils, "resolve_cache_hit_alignment_tokens", None)
    if resolve is None:
        return
    leading = cache_configs[0]
    scheduler_block, hashed = kv_cache_utils.resolve_kv_cache_block_sizes(leading, config)
    alignment = resolve(leading, config, scheduler_block, hashed)
    for each in (config.cache_config, *cache_configs):
        each.hash_block_size, each.cache_hit_alignment_tokens = hashed, alignment


def _placed(cache: PagedCache, group: Group, region: int) -> KVCacheTensor:
    """Return where the layers of a group lie in memory; `region`: bytes of one layer."""
    first, *more = [cache.tensors[layer] for layer in group.layers]
    item = first.element_size()
    apart = (more[0].storage_offset() - first.storage_offset()) * item if more else region
    layers = [cache.names[layer] for layer in group.layers]
    return KVCacheTensor(
        size=region * len(layers),
        layers=layers,
        layer_stride=apart,
        block_stride=first.stride(0) * cache.kernel_blocks * item,
    )


def registered(
    cache: PagedCache, config: Any, cache_config: KVCacheConfig, only: str | None
) -> dict[str, Any]:
    """Return the fields of the event kv.registered."""
    first = cache.tensors[0]
    found: dict[str, Any] = dict(
        required=None,
        possible=[only] if only else None,
        layout=cache.layout,
        told=getattr(cache_config, "kv_cache_layout", None),
        shape=list(first.shape),
        strides=list(first.stride()),
        context_ranks=cache.share.ranks,
        kernel_blocks=cache.kernel_blocks,
        own_shape=None,
        own_strides=None,
    )
    if RESOLVES_LAYOUTS:
        transfer = config.kv_transfer_config
        required = transfer and KVConnectorFactory.get_connector_class(
            transfer
        ).get_required_kvcache_layout(config)
        found["required"] = _ALIASES.get(required, required)
        group = of_scheduler(cache_config).kv_cache_groups[0]
        tensor = cache_config.kv_cache_tensors[0]
        layout = config.cache_config.get_resolved_kv_cache_layout()
        raw = torch.zeros(tensor.size, dtype=torch.int8)
        views = kv_cache_interface.create_kv_cache_views(
            raw, group.kv_cache_spec, cache.num_blocks, layout, tensor, cache.kernel_block_size
        )
        found["own_shape"] = list(views[0].shape)
        found["own_strides"] = list(views[0].stride())
    return found
