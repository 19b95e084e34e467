# SPDX-License-Identifier: Apache-2.0
"""Planted defects with several KV cache groups: connectors that mix them up, and engine faults."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvconform.refimpl.cache.chunks import open_store
from kvconform.refimpl.connector import Finish, ReferenceConnector
from kvconform.refimpl.faulty import Target, returns
from kvconform.refimpl.keys import digest
from kvconform.refimpl.plan import Load, Piece, Save
from kvconform.refimpl.tracking import Tracked
from kvconform.refimpl.variants.hybrid import HybridConnector, Part, Share
from kvconform.refimpl.variants.plain import Plain, PlainMetadata

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
SUPPORTS_HMA = Target(f"{FACTORY}.supports_hma_config")
KV_CACHE_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
WINDOW_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager"


class ZeroesNothing(HybridConnector):
    """Switches off that new blocks are zeroed, also of requests for which it loads nothing."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        scheduler_output.new_block_ids_to_zero = None
        return metadata


class FirstTableForAll(HybridConnector):
    """Finds the blocks of all layers in the first group's table (B092)."""

    def _shares(self, tracked: Tracked, start: int, end: int) -> Iterator[Share]:
        tracked.tables = [tracked.tables[0]] * len(tracked.tables)
        yield from super()._shares(tracked, start, end)


class SavesFromFirstTable(HybridConnector):
    """Saves all layers from the first group's table, and loads from the right ones (B092)."""

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        tables, tracked.tables = tracked.tables, [tracked.tables[0]] * len(tracked.tables)
        try:
            return super()._plan_save(tracked, end, scheduled, final)
        finally:
            tracked.tables = tables


class AppendsToTables(HybridConnector):
    """Appends the blocks of a step to its copy of a table, and takes none out of it (B157).

    Blocks for the states after drafts move to the end of the table; the copy has them twice.
    """

    def _plan_saves(self, scheduler_output: Any) -> Iterator[Save]:
        scheduler_output.kv_connector_block_state = None
        yield from super()._plan_saves(scheduler_output)


class KeysOfTheWindow(HybridConnector):
    """Keys the KV of a window by the tokens in it, as if it did not rest on those before them.

    It knows the tenant, and neither the adapter nor images.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._alone: dict[tuple[str, int], str] = {}
        self._parts = [
            part
            if part.window is None
            else _KeyedAlone(part.number, part.block_size, part.window, alone=self._alone)
            for part in self._parts
        ]

    def _keys(self, request: Request, keys: list[str], end: int) -> Sequence[str]:
        found = super()._keys(request, keys, end)
        chunk = self.options.chunk_tokens
        for part in self._parts:
            if part.window is None:
                continue
            for number, key in enumerate(found):
                last = (number + 1) * chunk
                tokens = request.all_token_ids[max(0, last - part.window) : last]
                alone = digest(request.cache_salt or "", array("q", tokens).tobytes())
                self._alone[key, part.number] = alone.hex()
        return found


@dataclass(frozen=True)
class _KeyedAlone(Part):
    """A group with a window, and the keys of its chunks by the keys of whole prefixes."""

    alone: Mapping[tuple[str, int], str] = field(default_factory=dict)

    def key(self, chunk: str) -> str:
        return super().key(self.alone[chunk, self.number])


class ForgivesLostWindows(HybridConnector):
    """Takes a load for complete if only what is in a window is gone from its store."""

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        kept = [
            piece
            for piece in load.pieces
            if self._store.has(piece.key) or not isinstance(piece, Share) or not piece.part.window
        ]
        super()._load(replace(load, pieces=tuple(kept)), layers)


class SavesTheLastBlock(HybridConnector):
    """Takes the last block of a recurrent layer's table for the one with the state (B158)."""

    def _pieces(self, tracked: Tracked, start: int, end: int) -> tuple[Piece, ...]:
        return tuple(
            replace(share, slots=(tracked.tables[share.part.number][-1],))
            if isinstance(share, Share) and share.part.recurrent
            else share
            for share in super()._pieces(tracked, start, end)
        )


class LoadsStatesInLayers(HybridConnector):
    """Loads each layer when the layer waits for it, which recurrent ones do not do."""

    start_load_kv = ReferenceConnector.start_load_kv


class ForgetsTheLastBlock(HybridConnector):
    """Leaves the last of the blocks that a save rests on out of the check for failed loads."""

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        save = super()._plan_save(tracked, end, scheduled, final)
        return replace(save, table=save.table[:-1])


class LoadsIntoNullBlocks(HybridConnector):
    """Takes the null entries of a table for blocks, and loads into them (B091)."""

    def _inside(self, share: Share) -> Share:
        return share

    def _is_filled(self, part: Part, keys: Sequence[str], end: int) -> bool:
        chunks = -(-end // self.options.chunk_tokens)
        return all(self._store.has(part.key(key)) for key in keys[:chunks])


class IgnoresTheWindow(ReferenceConnector):
    """Takes a model with one group for one without a window.

    Its table has null blocks where the window has passed, and its chunks are looked up from the
    first on.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.several_groups = True  # skips the check
        super().__init__(vllm_config, role, kv_cache_config)


class TakesAChunkForABlock(HybridConnector):
    """Loads one block for a layer with local attention: the last one of the chunk."""

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        return _last_of_local(super()._plan_load(tracked, granted, is_async), 1)


class TakesAChunkForAWindow(HybridConnector):
    """Loads as much for a layer with local attention as for a sliding window of the same length.

    The table has null blocks for what belongs to the chunk before.
    """

    def _inside(self, share: Share) -> Share:
        return share if share.part.local else super()._inside(share)

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load = super()._plan_load(tracked, granted, is_async)
        windows = [part.window or 0 for part in self._parts if part.local]
        return _last_of_local(load, -(-max(windows, default=0) // self.options.chunk_tokens))


class KeepsFinishedTails(HybridConnector):
    """Accepts the state that a request ends with, and never reports the request as sent.

    Its own saves are done when the step is, so it has nothing to report.
    """

    def register_finished_partial_tail(
        self, request: Any, block_ids: Any, partial_tail_offloads: Any
    ) -> bool:
        return True


class LoadsTheEndedChunk(HybridConnector):
    """Loads the chunk of local attention that a hit ends with, which nothing reads any more.

    The table has null blocks there, and nobody may have stored that chunk.
    """

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load = super()._plan_load(tracked, granted, is_async)
        windows = {part.number: part.window for part in self._parts if part.local and part.window}
        ended = tuple(
            share
            for share in self._shares(tracked, load.start, load.end)
            if (window := windows.get(share.part.number)) is not None
            and load.end % window == 0
            and load.end - window <= load.start
        )
        return replace(load, pieces=(*load.pieces, *ended))


def _last_of_local(load: Load, count: int) -> Load:
    """Return the load with the last `count` pieces of layers with local attention only."""
    local = [each for each in load.pieces if isinstance(each, Share) and each.part.local]
    left_out = {each.key for each in local[:-count]}
    return replace(load, pieces=tuple(each for each in load.pieces if each.key not in left_out))


class SavesTheWindowAgain(Plain):
    """Saves all of a request's table in every step, and not each block once.

    The connector's own table still has the blocks that the window has left behind, which belong to
    another request by then.
    """

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        index, self._index = self._index, {}
        try:
            return super().build_connector_meta(scheduler_output)
        finally:
            self._index = index


class SavesEveryFifthStep(Plain):
    """Saves in every fifth step what the steps before it have computed.

    It saves all of its own table, and when a window has left the first blocks of a prompt behind,
    they may belong to another request by then.
    """

    _steps = 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, PlainMetadata)
        self._steps += 1
        if self._steps % 5:
            meta.saves.clear()
        return meta


class TakesTheHitForAll(HybridConnector):
    """Takes the local hit of the full attention for that of all groups.

    Behind a local hit, it loads no recurrent state.
    """

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return True

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load = super()._plan_load(tracked, granted, is_async)
        if not load.start:
            return load
        kept = (
            piece
            for piece in load.pieces
            if not (isinstance(piece, Share) and piece.part.recurrent)
        )
        return replace(load, pieces=tuple(kept))


class KeepsOldTables(HybridConnector):
    """Saves a complete prompt from a table that it assembled step by step (B090).

    By then, blocks that have left the window belong to other requests.
    """

    def _extend_table(
        self, tracked: Tracked, new_blocks: Sequence[Sequence[int]] | None, replaces: bool
    ) -> None:
        self._state = None
        super()._extend_table(tracked, new_blocks, replaces)

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        return request.num_prompt_tokens if computed + scheduled >= request.num_prompt_tokens else 0


class OneBlockSize(HybridConnector):
    """Divides positions by the smallest block size, whatever the group (B094, B095)."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        block_size = self._vllm_config.cache_config.block_size
        self._parts = [replace(part, block_size=block_size) for part in self._parts]


class FirstBlockSize(HybridConnector):
    """Divides positions by the block size of the first group, whatever the group."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        size = self._parts[0].block_size
        self._parts = [
            part if part.recurrent else replace(part, block_size=size) for part in self._parts
        ]


class OneSizeOfFullAttention(HybridConnector):
    """Takes the blocks of the first group with full attention for the size of all such groups."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        size = next(part.block_size for part in self._parts if part.window is None)
        self._parts = [
            replace(part, block_size=size) if part.window is None else part for part in self._parts
        ]


class WindowsOfTheFirstRank(HybridConnector):
    """Loads what the first rank has stored of windows and states, on every rank."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        world = vllm_config.parallel_config.world_size
        self._first = open_store(self.options.store, 0, world, self.options.patience)

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        assert isinstance(piece, Share)
        mine = self._store
        if piece.part.window is not None:
            self._store = self._first
        try:
            return super()._load_layer(piece, layer)
        finally:
            self._store = mine


class TransfersEverything(HybridConnector):
    """Stores and loads the groups that are excluded from the transfer."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        kept_back = [
            Part(number, group.kv_cache_spec.block_size, None)
            for number, group in enumerate(kv_cache_config.kv_cache_groups)
            if not group.enable_kv_transfer
        ]
        self._parts += kept_back


class NamesBlocks(HybridConnector):
    """Reports failed loads by block id, which is ambiguous without a group (B071)."""

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        ReferenceConnector._load(self, load, layers)


class RepeatsFailures(HybridConnector):
    """Keeps the requests whose load has failed, and reports them again in every step."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        self._failed = set(results.failed_recving)
        return results


class DistrustsForGood(HybridConnector):
    """Saves nothing of a block whose load has failed, whichever request it belongs to later."""

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        super()._load(load, layers)
        if load.req in self._failed:
            for piece in load.pieces:
                self._bad |= piece.blocks(self._block_size)


class ForgetsTheWindow(HybridConnector):
    """Claims any prefix of a prompt, and has the window only of the complete prompt (B016).

    It stores a prompt when it is complete, without what has left the window.
    """

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        return request.num_prompt_tokens if computed + scheduled >= request.num_prompt_tokens else 0

    def _is_filled(self, part: Part, keys: Sequence[str], end: int) -> bool:
        return True


class ForgetsTheMixin(ReferenceConnector):
    """Has the method of SupportsHMA, and is not a subclass of it (B096)."""

    change_of, several_groups = HybridConnector, True

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> Finish:
        return self.request_finished(request, block_ids[0])


class TakesTheRunningState(HybridConnector):
    """Stores the latest state under the key of every block that the step completed.

    The state belongs to the last of these blocks only.
    """

    _saving = False

    def _shares(self, tracked: Tracked, start: int, end: int) -> Iterator[Share]:
        for share in super()._shares(tracked, start, end):
            if share.part.recurrent and self._saving:
                blocks = reversed(tracked.tables[share.part.number])
                latest = next((block for block in blocks if block), 0)
                share = replace(share, slots=(latest,))
            yield share

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        self._saving = True
        try:
            return super()._plan_save(tracked, end, scheduled, final)
        finally:
            self._saving = False


turns_hybrid_off = SUPPORTS_HMA.replaced_by(returns(False))
"""Treat no connector as one that supports several groups, as vLLM did until 0.21 (B096)."""

starts_anybody = SUPPORTS_HMA.replaced_by(returns(True))
"""Start connectors with several groups that do not declare that they support them."""


@Target(f"{KV_CACHE_MANAGER}.get_block_ids_for_computed_tokens").replaced_by
def finishes_with_lookahead(
    blocks: Any, manager: KVCacheManager, request_id: str, num_computed_tokens: int
) -> Any:
    """Pass all blocks at the end of a request, lookahead blocks included."""
    return manager.get_block_ids(request_id)


@Target(f"{WINDOW_MANAGER}.get_num_skipped_tokens").replaced_by
def keeps_a_block_too_many(skipped: Any, manager: Any, num_computed_tokens: int) -> int:
    """Keep one block before the window."""
    return max(0, int(skipped(manager, num_computed_tokens)) - int(manager.block_size))


@Target(f"{KV_CACHE_MANAGER}.get_blocks").replaced_by
def tells_of_one_group(blocks: Any, manager: KVCacheManager, request_id: str) -> Any:
    """Pass only the blocks of the first group."""
    found = blocks(manager, request_id)
    return type(found)(found.blocks[:1])


_offered: dict[int, Any] = {}


@Target(f"{KV_CACHE_MANAGER}.take_boundary_state_offloads").replaced_by
def offers_states_again(take: Any, manager: KVCacheManager) -> Any:
    """Offer the boundary states of the step before once more."""
    now = take(manager)
    before, _offered[id(manager)] = _offered.get(id(manager), {}), now
    return {**before, **now}
