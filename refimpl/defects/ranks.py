# SPDX-License-Identifier: Apache-2.0
"""Ranks that do not keep their shards apart, or that speak for each other; and an aggregator that does not listen to all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

from kvconform.compat.vllm_api import ModelRunnerOutput
from kvconform.engine.lifecycle import VllmV1
from kvconform.engine.ranks import Follower
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.faulty import fault
from kvconform.refimpl.plan import Load, Save
from kvconform.refimpl.store import open_store
from kvconform.refimpl.variants.ranks import Drifting


class _Ranked(ReferenceConnector):
    """Knows its rank."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._rank = vllm_config.parallel_config.rank
        self._world = vllm_config.parallel_config.world_size


class OneShardForAll(_Ranked):
    """Its keys do not name the rank: each rank writes over what the other has stored."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._store = open_store(self.options.store)


class NumbersItsLayers(OneShardForAll):
    """Its keys have the number of a layer in the rank's own list, and every pipeline stage counts from 0."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(
            {str(number): layer for number, layer in enumerate(kv_caches.values())}
        )


class OnlyFirstStores(OneShardForAll):
    """Only the first rank stores and loads, as with attention whose KV is the same on all ranks; this one's is split."""

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        if self._rank == 0:
            super()._save_layer(epoch, save, layer, kv_layer)

    def _load(self, load: Load, layers: Any) -> None:
        if self._rank == 0:
            super()._load(load, layers)


class UnscaledBlocks(ReferenceConnector):
    """Counts with the block size of a rank's memory, of which the engine's blocks are a multiple (B130)."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size


class FirstHeads(_Ranked):
    """Every rank loads the heads from the first one on, whichever it has."""

    def _load(self, load: Load, layers: Any) -> None:
        own, self._store = self._store, open_store(self.options.store, 0, self._world)
        super()._load(load, layers)
        self._store = own


class ClaimsForOneRank(Drifting):
    """A chunk counts as stored once the first rank has stored it; what another rank does not find, it does not load."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        shelf: Any = self._store._shelf  # type: ignore[attr-defined]
        self._store.has = lambda key: 0 in shelf.committed.get(key, ())  # type: ignore[method-assign]

    def _load_layer(self, piece: Any, layer: str) -> bool:
        super()._load_layer(piece, layer)
        return True


class OnlyFirstReports(_Ranked):
    """Only the first rank reports finished loads, although every rank is waited for."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        return sent, received if self._rank == 0 else None


class ReportsForAll(Drifting):
    """The first rank reports a load once for every rank, in as many steps."""

    _again: frozenset[str] = frozenset()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        again, self._again = self._again, frozenset(received or ())
        if self._vllm_config.parallel_config.rank:
            return sent, None
        return sent, (received or set()) | again or None


class WaitsForOne(Drifting):
    """Tells the engine to wait for one report, as where every rank has everything; here each loads a shard of its own."""

    def get_finished_count(self) -> int | None:
        return 1


class RenamesTheEngine(ReferenceConnector):
    """Puts its rank into the engine id, so that its sockets have names of their own."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role.name == "WORKER":
            vllm_config.kv_transfer_config.engine_id += f"-{vllm_config.parallel_config.rank}"


@fault(KVOutputAggregator, "__init__")
def first_report_counts(
    original: Callable[..., Any], self: Any, expected_finished_count: int
) -> None:
    """Takes a transfer for finished when the first rank says so."""
    original(self, 1)


def _others(outputs: list[Any], output_rank: int) -> list[Any]:
    return [
        output.kv_connector_output
        for rank, output in enumerate(outputs)
        if rank != output_rank and output.kv_connector_output
    ]


@fault(KVOutputAggregator, "aggregate")
def drops_stages(
    original: Callable[..., Any], self: Any, outputs: list[Any], output_rank: int = 0
) -> Any:
    """What a rank that does not sample reports is dropped."""
    for other in _others(outputs, output_rank):
        other.finished_sending = other.finished_recving = None
    return original(self, outputs, output_rank)


@fault(KVOutputAggregator, "aggregate")
def errors_of_one_rank(
    original: Callable[..., Any], self: Any, outputs: list[Any], output_rank: int = 0
) -> Any:
    """Failed blocks of a rank that does not sample are nobody's business."""
    for other in _others(outputs, output_rank):
        other.invalid_block_ids = set()
    return original(self, outputs, output_rank)


@fault(KVOutputAggregator, "aggregate")
def failures_at_once(
    original: Callable[..., Any], self: Any, outputs: list[Any], output_rank: int = 0
) -> Any:
    """A failed load is passed on as soon as one rank says so, while others still write."""
    said = {
        req
        for output in outputs
        if output.kv_connector_output
        for req in output.kv_connector_output.failed_recving
    }
    result = original(self, outputs, output_rank)
    result.kv_connector_output.failed_recving = said
    return result


def _sits_out(life: Any, output: Any) -> bool:
    """Whether this is the stage that samples, in a step that leaves it nothing to sample."""
    return not output.total_num_scheduled_tokens and not isinstance(life.worker, Follower)


@fault(VllmV1, "step")
def waits_for_its_own_tokens(step: Callable[..., Any], life: Any, output: Any) -> Any:
    """In a step without tokens, the last stage goes the way of those that receive the sampled tokens, and asserts (B114)."""
    result = step(life, output)
    assert not _sits_out(life, output), "the last stage has nobody to receive tokens from"
    return result


@fault(VllmV1, "step")
def last_stage_sits_out(step: Callable[..., Any], life: Any, output: Any) -> Any:
    """The last stage returns from a step without tokens before it comes to the connector."""
    if _sits_out(life, output):
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[])
    return step(life, output)
