# SPDX-License-Identifier: Apache-2.0
"""Planted defects: counters that are not what the connector declares that they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvconform.refimpl.connector import Lookup, ReferenceConnector
from kvconform.refimpl.paging import bytes_in
from kvconform.refimpl.plan import Load, Piece
from kvconform.refimpl.telemetry import COUNTERS, ReferenceMetrics
from kvconform.refimpl.variants.hybrid import HybridConnector
from kvconform.refimpl.variants.metered import Metered

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.request import Request


class _Counting(ReferenceConnector):
    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {**super().kvconform_capabilities(extra_config), "metrics": COUNTERS}


class CountsPlanned(_Counting):
    """Counts what a load is to bring, also if the store has lost it."""

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        for piece in load.pieces:
            for layer in layers:
                kv_layer = self._layers[layer]
                self._count("bytes_loaded", bytes_in(kv_layer, piece.slots, self._share))
        super()._load(load, layers)

    def _load_counted(self, piece: Piece, layer: str) -> bool:
        return self._load_layer(piece, layer)


class CountsRetries(_Counting):
    """Counts a lookup as a hit whenever the engine asks, and not when it grants the load."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens:
            super()._count("tokens_granted", tokens)
        return tokens, is_async

    def _count(self, name: str, by: float = 1) -> None:
        if name != "tokens_granted":
            super()._count(name, by)


class CountsOneRank(_Counting):
    """Reports the statistics of the first rank only."""

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = super().get_kv_connector_stats()
        is_first = self._vllm_config.parallel_config.rank == 0
        return stats if is_first or self.role == KVConnectorRole.SCHEDULER else None


class _LastOnly(ReferenceMetrics):
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if "bytes_loaded" in transfer_stats_data:
            for counter in self._counters.values():
                counter.clear()
        super().observe(transfer_stats_data, engine_idx)


class ForgetsIntervals(_Counting):
    """Starts its metrics again with each load, as if a counter was a gauge."""

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        return _LastOnly(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class CountsMissesAgain(Metered):
    """Counts a miss whenever the engine asks, also for a request that it asks about again."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        super()._count_missed(self._wanted.get(request.request_id, 0) - (tokens or 0))
        return tokens, is_async

    def _count_missed(self, tokens: int) -> None:
        return


class CountsChunksAsBytes(Metered):
    """Counts the chunks that it saves, and calls them bytes."""

    def _count_saved(self, size: int) -> None:
        super()._count_saved(1)


class CountsBlocksTwice(Metered):
    """Counts the blocks of a load when it is planned as well."""

    def _count_blocks(self, blocks: int) -> None:
        super()._count_blocks(2 * blocks)


class CountsNewStates(HybridConnector):
    """Counts the states that it is offered, but not those that it has stored already."""

    def _count_offers(self) -> None:
        offers = getattr(self._state, "boundary_state_offloads", {})
        for req, states in offers.items():
            keys = self._keys(self._tracked[req].request, [], max(end for *_, end in states))
            for group, _, end in states:
                key = keys[end // self.options.chunk_tokens - 1]
                if not self._store.has(self._parts[group].key(key)):
                    self._count("states_offered")

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        counters = {"states_offered": ["states_offered"]}
        return {**super().kvconform_capabilities(extra_config), "metrics": counters}


class CountsLossesOnly(Metered):
    """Counts as evictions what leaves the last level, and not what is moved down from others."""

    @staticmethod
    def _evictions(counts: dict[str, int]) -> list[int]:
        return [counts[max(name for name in counts if name.endswith("_evicted"))]]


class CountsMilliseconds(Metered):
    """Counts the milliseconds of its loads, and calls them seconds."""

    def _count_seconds(self, seconds: float) -> None:
        super()._count_seconds(seconds * 1000)
