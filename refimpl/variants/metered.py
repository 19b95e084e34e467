# SPDX-License-Identifier: Apache-2.0
"""A connector over tiers with every counter that the suite compares (systems.md C10)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import Lookup
from kvconform.refimpl.inspector import Inspector
from kvconform.refimpl.paging import bytes_in
from kvconform.refimpl.plan import Load, Piece, Save
from kvconform.refimpl.telemetry import COUNTERS
from kvconform.refimpl.variants.tiers import CacheInspector, Tiered

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

MEANINGS = (
    "tokens_loaded",
    "blocks_loaded",
    "tokens_missed",
    "bytes_saved",
    "tokens_saved",
    "evictions",
    "load_seconds",
)


class Metered(Tiered):
    """The connector over tiers, with counters of loads, misses, saves, evictions and seconds."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Scheduler half: tokens that requests lack, until they are admitted.
        self._wanted: dict[str, int] = {}
        # Worker half: blocks that a load has written.
        self._written: set[int] = set()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        if not request.skip_reading_prefix_cache:
            self._wanted[request.request_id] = request.num_tokens - num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Count what an admitted request has to compute: its last lookup counts."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        wanted = self._wanted.pop(request.request_id, num_external_tokens)
        self._count_missed(wanted - num_external_tokens)

    def _count_missed(self, tokens: int) -> None:
        if tokens:
            self._count("tokens_missed", tokens)

    def request_finished(self, request: Request, block_ids: list[int]) -> Any:
        self._wanted.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        start = time.monotonic()
        super()._load(load, layers)
        self._count_seconds(time.monotonic() - start)
        self._count_blocks(len(self._written))
        self._written.clear()

    def _load_counted(self, piece: Piece, layer: str) -> bool:
        is_loaded = super()._load_counted(piece, layer)
        if is_loaded and self._is_first(layer):
            self._count("tokens_loaded", len(piece.slots))
            self._written |= piece.blocks(self._block_size)
        return is_loaded

    def _is_first(self, layer: str) -> bool:
        """Whether tokens are counted with this layer, so that they count once."""
        return layer == next(iter(self._layers))

    def _count_seconds(self, seconds: float) -> None:
        self._count("load_seconds", seconds)

    def _count_blocks(self, blocks: int) -> None:
        if blocks:
            self._count("blocks_loaded", blocks)

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        super()._save_layer(epoch, save, layer, kv_layer)
        if self._is_sound(save):
            for piece in save.pieces:
                self._count_saved(bytes_in(kv_layer, piece.slots, self._share))
            if self._is_first(layer):
                self._count("tokens_saved", sum(len(piece.slots) for piece in save.pieces))

    def _count_saved(self, size: int) -> None:
        self._count("bytes_saved", size)

    def get_kv_connector_stats(self) -> Any:
        """Add up the evictions of all levels; one half reports the levels."""
        before = sum(self._evictions(self._reported))
        found = super().get_kv_connector_stats()
        evicted = sum(self._evictions(self._reported)) - before
        if found is not None and evicted:
            found.data["evictions"] = evicted
        return found

    @staticmethod
    def _evictions(counts: dict[str, int]) -> list[int]:
        return [count for name, count in counts.items() if name.endswith("_evicted")]

    # -- Suite

    def kvconform_inspector(self) -> Inspector:
        return KeyInspector(self)

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        counters = COUNTERS | {name: [name, f"kvconform_{name}"] for name in MEANINGS}
        return {**super().kvconform_capabilities(extra_config), "metrics": counters}


class KeyInspector(CacheInspector):
    """Shows the suite the keys of the entries, too, so that it sees which ones leave a level."""

    def cache(self) -> dict[str, Any]:
        state = super().cache()
        for shown, level in zip(state["levels"], self._connector._cache.tiers.levels, strict=True):
            shown["keys"] = level.stored()
        return state
