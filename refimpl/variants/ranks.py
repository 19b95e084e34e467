# SPDX-License-Identifier: Apache-2.0
"""Correct connectors whose ranks behave differently; with one rank, the reference connector."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.plan import Load


class Drifting(ReferenceConnector):
    """Each rank's transfers take two steps longer than those of the rank before."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        late = 2 * vllm_config.parallel_config.rank
        self.options = replace(
            self.options,
            load_delay=self.options.load_delay + late,
            save_delay=self.options.save_delay + late,
        )


class LosesShards(ReferenceConnector):
    """One rank, the last, cannot read a part of every second load, and reports it."""

    loser = -1

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Declare that less may arrive than was found."""
        return {**super().kvconform_capabilities(extra_config), "best_effort": True}

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._loses = parallel.world_size > 1 and parallel.rank == self.loser % parallel.world_size
        self._turns = 0

    def _load(self, load: Load, layers: Any) -> None:
        if self._loses:
            self._turns += 1
        if self._turns % 2 and load.pieces:
            lost = load.pieces[-1].blocks(self._block_size)
            self._invalid |= lost
            self._bad |= lost
            load = replace(load, pieces=load.pieces[:-1])
        super()._load(load, layers)


class OwnShards(ReferenceConnector):
    """Each rank looks only for its own shard of a chunk, and names the blocks that it lacks."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            rank = vllm_config.parallel_config.rank
            self._store._ranks = range(rank, rank + 1)


class FirstRankReports(ReferenceConnector):
    """Its first rank names the blocks of chunks that are gone on all ranks, and no other rank does.

    vLLM takes the union of what the ranks name. What only one rank cannot read, it names itself.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._is_first = vllm_config.parallel_config.rank == 0

    def _load(self, load: Load, layers: Any) -> None:
        gone = [piece for piece in load.pieces if not self._store.has(piece.key)]
        super()._load(load, layers)
        if not self._is_first:
            self._invalid -= set[int]().union(*(piece.blocks(self._block_size) for piece in gone))


class OneRankReports(ReferenceConnector):
    """A peer writes to all ranks, and tells the first one alone, which reports for all.

    `get_finished_count` says so. The bytes of the other ranks arrive on threads of the peer's.
    """

    _workers: ClassVar[dict[tuple[str, int], OneRankReports]] = {}

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._name = str(vllm_config.kv_transfer_config.engine_id)
        self._rank = vllm_config.parallel_config.rank
        self._others = range(1, vllm_config.parallel_config.world_size)
        if role == KVConnectorRole.WORKER:
            self._workers[self._name, self._rank] = self

    def get_finished_count(self) -> int:
        """Return how many ranks report a transfer."""
        return 1

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._rank:
            for epoch, save in self._save_queue.poll():
                self._save(epoch, save, self._layers)
            self._sent.clear()
            return None, None
        sent, received = super().get_finished(finished_req_ids)
        ended = received or set()
        for other in [self._workers[self._name, rank] for rank in self._others]:
            for load in other._load_queue.take(lambda load: load.req in ended):
                thread = Thread(target=other._load, args=(load, other._layers))
                thread.start()
                thread.join()
        return sent, received

    def shutdown(self) -> None:
        super().shutdown()
        if self._workers.get((self._name, self._rank)) is self:
            del self._workers[self._name, self._rank]


class FailsById(LosesShards, Drifting):
    """Reports a failed asynchronous load by its request, not by its blocks.

    The rank that cannot read its part finishes first.
    """

    loser = 0

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._failed: set[str] = set()

    def _load(self, load: Load, layers: Any) -> None:
        super()._load(load, layers)
        if load.is_async and self._invalid:
            self._invalid = set()
            self._failed.add(load.req)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        failed, self._failed = self._failed, set()
        results.failed_recving.update(failed)
        return results

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for req in connector_output.failed_recving & self._tracked.keys():
            self._repaired |= set(self._tracked[req].table)
