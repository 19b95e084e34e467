# SPDX-License-Identifier: Apache-2.0
"""The shape of a running engine's KV cache, in the terms of kvconform.groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvconform.groups import Group


@dataclass
class Shape:
    """Blocks, and the groups of layers; what the observer asks of a cache. `names` are the layers, in the order of their numbers."""

    num_blocks: int
    groups: tuple[Group, ...]
    names: list[str]
    share: tuple[int, int] = (0, 1)
    group_of: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.group_of = np.zeros(self.num_blocks, dtype=np.int64)

    @property
    def block_size(self) -> int:
        """Tokens per block of the first group."""
        return self.groups[0].block_size


def shape_of(config: Any) -> Shape:
    """The shape that a KVCacheConfig stands for. Kinds of groups that are not known here count as full."""
    names: list[str] = []
    groups = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        window = getattr(spec, "sliding_window", None)
        layers = tuple(range(len(names), len(names) + len(group.layer_names)))
        names += group.layer_names
        transfer = bool(getattr(group, "enable_kv_transfer", True))
        kind: Any = "sliding" if window else "state" if "Mamba" in type(spec).__name__ else "full" if transfer else "private"
        groups.append(Group(kind, layers, spec.block_size, getattr(spec, "num_kv_heads", 1), window, transfer))
    return Shape(config.num_blocks, tuple(groups), names)
