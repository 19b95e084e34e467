# SPDX-License-Identifier: Apache-2.0
"""Connectors that answer late, load more than they must, or take their time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.plan import Load, Piece, ReferenceMetadata
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

PATIENCE = 3


class Undecided(ReferenceConnector):
    """Answers three lookups of a request with "not yet" (systems.md B3)."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._asked: dict[str, int] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        asked = self._asked[request.request_id] = self._asked.get(request.request_id, 0) + 1
        return (
            (None, False)
            if asked <= PATIENCE
            else super().get_num_new_matched_tokens(request, num_computed_tokens)
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._asked.pop(request.request_id, None)
        return super().request_finished(request, block_ids)


class Uneven(Undecided):
    """Looks up one request after the other, as a store that is asked over a wire: the second one is answered when the first one runs."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._asked.setdefault(request.request_id, -4 * len(self._asked))
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class NeverHits(ReferenceConnector):
    """Stores everything and finds nothing, as a producer does whose consumers are elsewhere."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False


class BlockFiller(ReferenceConnector):
    """Moves whole blocks: fills the rest of the last granted block too, before anything in it is computed, as NIXL does."""

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load = super()._plan_load(tracked, granted, is_async)
        end = min(
            -(-load.end // self._block_size) * self._block_size,
            self._stored_prefix(tracked.request),
        )
        pieces = self._pieces(tracked, load.start, max(end, load.end))
        return Load(load.req, load.start, load.end, pieces, is_async)


class Delayed(ReferenceConnector):
    """Loads of longer ranges take longer, so they finish in another order than they started."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._metadata().loads:
            self._load_queue.add(load, 1 + (load.end - load.start) // self._block_size % 3)


class Unreliable(ReferenceConnector):
    """Every second load fails, is reported block by block, and what it should have loaded is not looked for again."""

    loads = 0

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        return False if self.loads % 2 == 1 else super()._load_layer(piece, layer)

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        self.loads += 1
        super()._load(load, layers)


class ForeseesFailures(ReferenceConnector):
    """Knows when an asynchronous load begins that half of it will not come (every other one). It says so at once and only then, steps
    before the load is over; the other half is still written."""

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
    """Spreads an asynchronous load over the metadata of several steps, a chunk in each. The last part is the one that is reported."""

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
    """One load per piece. Those before the last are done in start_load_kv: nobody waits for them but the last."""
    start = load.start
    for piece in load.pieces:
        end = start + len(piece.slots)
        yield Load(load.req, start, end, (piece,), is_async=piece is load.pieces[-1])
        start = end


class Stumbles(ReferenceConnector):
    """Every third load fails, the first one too, for a reason that is gone at the next attempt: what was stored stays where it is."""

    loads = 0

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        self.loads += 1
        if self.loads % 3 != 1:
            super()._load(load, layers)
            return
        failed = set[int]().union(*(piece.blocks(self._block_size) for piece in load.pieces))
        self._invalid |= failed
        self._bad |= failed
