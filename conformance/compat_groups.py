# SPDX-License-Identifier: Apache-2.0
"""What depends on the installed vLLM where a model has several KV cache groups: how it says so."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, SlidingWindowSpec

from kvconform.compat import torch
from kvconform.groups import Group
from kvconform.kvcache import PagedCache


def _spec(group: Group, head_dim: int) -> Any:
    """The KVCacheSpec of a group."""
    shape: dict[str, Any] = dict(block_size=group.block_size, num_kv_heads=group.heads, head_size=head_dim, dtype=torch.float32)
    return FullAttentionSpec(**shape) if group.window is None else SlidingWindowSpec(**shape, sliding_window=group.window)


def build_cache_config(cache: PagedCache) -> KVCacheConfig:
    """The KVCacheConfig of a cache with several groups, whose layers lie on the same bytes."""
    names = [[cache.names[layer] for layer in group.layers] for group in cache.groups]
    specs = [_spec(group, cache.book.head_dim) for group in cache.groups]
    page, depth = specs[0].page_size_bytes, max(map(len, names))
    if "layers" in KVCacheTensor.__dataclass_fields__:  # since 0.31
        size = page * cache.num_blocks * depth
        tensors = [KVCacheTensor(size=size, layers=layers, layer_stride=page * cache.num_blocks, block_stride=page) for layers in names]
    else:
        shared = [[layers[index] for layers in names if index < len(layers)] for index in range(depth)]
        tensors = [KVCacheTensor(size=page * cache.num_blocks, shared_by=layers) for layers in shared]
    groups = []
    for layers, spec, group in zip(names, specs, cache.groups, strict=True):
        made = KVCacheGroupSpec(layers, spec)
        if hasattr(made, "enable_kv_transfer"):
            made.enable_kv_transfer = group.transfer
        groups.append(made)
    config = KVCacheConfig(num_blocks=cache.num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
    if hasattr(config, "hash_block_size"):
        config.hash_block_size = cache.block_size
    return config
