# SPDX-License-Identifier: Apache-2.0
"""Connectors that answer lookups late, load unusually, or fail some of their loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector
from kvconform.refimpl.plan import Load, Piece, ReferenceMetadata
from kvconform.refimpl.telemetry import COUNTERS
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

PATIENCE = 3
"""Lookups of a request that are answered with None."""


class Undecided(ReferenceConnector):
    """Answers the first three lookups of a request with None: "not yet" (systems.md B3)."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._asked: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        asked = self._asked.get(request.request_id, 0) + 1
        self._asked[request.request_id] = asked
        if asked <= PATIENCE:
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        self._asked.pop(request.request_id, None)
        return super().request_finished(request, block_ids)


class Uneven(Undecided):
    """Looks up one request after the other, like a remote store.

    The second request gets its answer when the first one is already running.
    """

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        # Each request under way adds four lookups to the wait of a new one.
        self._asked.setdefault(request.request_id, -4 * len(self._asked))
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class HonoursSkip(ReferenceConnector):
    """Does not look up a request that asks to skip the prefix cache; saves it.

    vLLM drops the answer (Scheduler.schedule), and its own connectors return early, too.
    """

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        if request.skip_reading_prefix_cache:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class NeverHits(ReferenceConnector):
    """Stores everything and finds nothing, like a producer for other engines."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        return 0, False


class BlockFiller(ReferenceConnector):
    """Fills the rest of the last granted block too, before any of it is computed, as NIXL does.

    It counts whole blocks.
    """

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {**super().kvconform_capabilities(extra_config), "metrics": COUNTERS}

    def _count(self, name: str, by: float = 1) -> None:
        if name == "tokens_granted":
            by = -(-by // self._block_size) * self._block_size
        super()._count(name, by)

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load = super()._plan_load(tracked, granted, is_async)
        block_end = -(-load.end // self._block_size) * self._block_size
        end = min(block_end, self._stored_prefix(tracked.request))
        pieces = self._pieces(tracked, load.start, max(end, load.end))
        return Load(load.req, load.start, load.end, pieces, is_async)


class Delayed(ReferenceConnector):
    """Takes longer for longer loads, so they finish in another order than they started."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._metadata().loads:
            self._load_queue.add(load, 1 + (load.end - load.start) // self._block_size % 3)


class BoundedLoads(ReferenceConnector):
    """Loads at most two blocks for a request, as one may whose network is slow."""

    @classmethod
    def kvconform_capabilities(cls, extra: dict[str, Any]) -> dict[str, Any]:
        """Return also that less may come back than was stored."""
        return super().kvconform_capabilities(extra) | {"best_effort": True}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (min(tokens, 2 * self._block_size), is_async) if tokens else (tokens, is_async)


class Unreliable(ReferenceConnector):
    """Fails every second load: reports its blocks and drops its chunks."""

    loads = 0

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        return False if self.loads % 2 == 1 else super()._load_layer(piece, layer)

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        self.loads += 1
        super()._load(load, layers)


class StopsAtFailure(ReferenceConnector):
    """Ends every other load in its middle, and reports the block in which the rest begins.

    vLLM computes everything again from there on.
    """

    loads = 0

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._behind: dict[int, set[int]] = {}  # the blocks that were not filled, by the first one

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, ReferenceMetadata):
            for block in kv_connector_metadata.repaired:
                self._bad -= self._behind.pop(block, set())
        super().handle_preemptions(kv_connector_metadata)

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        self.loads += 1
        wanted = list(layers)
        for number, piece in enumerate(load.pieces):
            ends = self.loads % 2 == 1 and number == len(load.pieces) // 2
            if ends or not all([self._load_counted(piece, layer) for layer in wanted]):
                self._store.drop(piece.key)
                first = piece.slots[0] // self._block_size
                rest = {block for p in load.pieces[number:] for block in p.blocks(self._block_size)}
                self._invalid.add(first)
                self._bad |= rest
                self._behind[first] = rest
                return


@dataclass(frozen=True)
class _WithRest(Piece):
    """A piece that knows the blocks of its chunk that lie behind it."""

    rest: frozenset[int]

    def blocks(self, block_size: int) -> set[int]:
        return super().blocks(block_size) | self.rest


class RoundsFailures(ReferenceConnector):
    """Reports all blocks of a chunk that failed, also those behind what was granted.

    vLLM computes everything again from the first one on.
    """

    def _pieces(self, tracked: Tracked, start: int, end: int) -> tuple[Piece, ...]:
        chunk, size = self.options.chunk_tokens, self._block_size
        pieces = []
        for piece in super()._pieces(tracked, start, end):
            start += len(piece.slots)
            chunk_end = -(-start // chunk) * chunk
            rest = tracked.table[-(-start // size) : -(-chunk_end // size)]
            pieces.append(_WithRest(piece.key, piece.first, piece.slots, frozenset(rest)))
        return tuple(pieces)


class ForeseesFailures(ReferenceConnector):
    """Reports the failed half of every other asynchronous load when the load starts.

    That is steps before the load has finished, and it does not repeat the report. The other half is
    still loaded.
    """

    loads = 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._metadata().loads:
            self.loads += 1
            kept = len(load.pieces) // 2 if self.loads % 2 == 1 else len(load.pieces)
            for piece in load.pieces[kept:]:
                self._store.drop(piece.key)
                self._invalid |= piece.blocks(self._block_size)
            self._load_queue.add(replace(load, pieces=load.pieces[:kept]), self.options.load_delay)


class InParts(ReferenceConnector):
    """Spreads an asynchronous load over several steps' metadata, one chunk in each.

    Only the last part is reported as finished.
    """

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._rest: list[list[Load]] = []

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        self._rest += [list(_parts(load)) for load in metadata.loads]
        now = tuple(parts.pop(0) for parts in self._rest)
        self._rest = [parts for parts in self._rest if parts]
        return replace(metadata, loads=now)


def _parts(load: Load) -> Iterator[Load]:
    """Yield one load per piece.

    Those before the last are synchronous, so start_load_kv does them and reports nothing.
    """
    start = load.start
    for piece in load.pieces:
        end = start + len(piece.slots)
        yield Load(load.req, start, end, (piece,), is_async=piece is load.pieces[-1])
        start = end


class Stumbles(ReferenceConnector):
    """Fails the first load and every third one after it, for a transient reason.

    Its chunks stay in the store, so the next attempt of the request succeeds.
    """

    loads = 0
    failed_last: str | None = None

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        self.loads += 1
        if self.loads % 3 != 1 or load.req == self.failed_last:
            super()._load(load, layers)
            return
        self.failed_last = load.req
        failed = set[int]().union(*(piece.blocks(self._block_size) for piece in load.pieces))
        self._invalid |= failed
        self._bad |= failed
