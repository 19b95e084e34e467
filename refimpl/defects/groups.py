# SPDX-License-Identifier: Apache-2.0
"""Several KV cache groups, handled as if there were one; and what an engine may do wrong about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.request import Request

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.faulty import fault
from kvconform.refimpl.plan import Load, Save
from kvconform.refimpl.tracking import Tracked
from kvconform.refimpl.variants.hybrid import HybridConnector, Part, Share


class FirstTableForAll(HybridConnector):
    """Finds the blocks of every layer in the first group's table (B092)."""

    def _shares(self, tracked: Tracked, start: int, end: int) -> Iterator[Share]:
        tracked.tables = [tracked.tables[0]] * len(tracked.tables)
        yield from super()._shares(tracked, start, end)


class SavesFromFirstTable(HybridConnector):
    """Saves every layer from the blocks of the first group's table; loads are right (B092)."""

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        tables, tracked.tables = tracked.tables, [tracked.tables[0]] * len(tracked.tables)
        try:
            return super()._plan_save(tracked, end, scheduled, final)
        finally:
            tracked.tables = tables


class LoadsIntoNullBlocks(HybridConnector):
    """Takes the null entries of a table for blocks, and fills them (B091)."""

    def _inside(self, share: Share) -> Share:
        return share

    def _is_filled(self, part: Part, keys: Sequence[str], end: int) -> bool:
        return all(
            self._store.has(part.key(key)) for key in keys[: -(-end // self.options.chunk_tokens)]
        )


class KeepsOldTables(HybridConnector):
    """Saves the prompt when it is complete, from a table that it put together from what was added step by step: by then, blocks that
    left the window belong to others (B090)."""

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
        self._parts = [
            replace(part, block_size=self._vllm_config.cache_config.block_size)
            for part in self._parts
        ]


class TransfersEverything(HybridConnector):
    """Stores and loads the groups, too, that are no part of the transfer."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        kept_back = [
            Part(number, group.kv_cache_spec.block_size, None)
            for number, group in enumerate(kv_cache_config.kv_cache_groups)
            if not group.enable_kv_transfer
        ]
        self._parts += kept_back


class NamesBlocks(HybridConnector):
    """Reports failed loads by block id, which says nothing without a group (B071)."""

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        ReferenceConnector._load(self, load, layers)


class ForgetsTheWindow(HybridConnector):
    """Stores a prompt once it is complete, without what has left the window; then claims any prefix of it, although only its end has
    all that the window needs (B016)."""

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        return request.num_prompt_tokens if computed + scheduled >= request.num_prompt_tokens else 0

    def _is_filled(self, part: Part, keys: Sequence[str], end: int) -> bool:
        return True


class ForgetsTheMixin(ReferenceConnector):
    """Ends a request in several groups as SupportsHMA wants it, and is not a subclass of it (B096)."""

    change_of, several_groups = HybridConnector, True

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])


@fault(KVConnectorFactory, "supports_hma_config")
def turns_hybrid_off(supports: Any, transfer: Any) -> bool:
    """Takes no connector for one that supports several groups: until 0.21 none was asked (B096)."""
    return False


@fault(KVConnectorFactory, "supports_hma_config")
def starts_anybody(supports: Any, *args: Any) -> bool:
    """Starts connectors with several groups that never said that they can."""
    return True


@fault(KVCacheManager, "get_block_ids_for_computed_tokens")
def finishes_with_lookahead(
    blocks: Any, manager: KVCacheManager, request_id: str, num_computed_tokens: int
) -> Any:
    """At the end of a request, tells of all blocks it had."""
    return manager.get_block_ids(request_id)


@fault(SlidingWindowManager, "get_num_skipped_tokens")
def keeps_a_block_too_many(skipped: Any, manager: Any, num_computed_tokens: int) -> int:
    """Keeps one block before the window."""
    return max(0, int(skipped(manager, num_computed_tokens)) - int(manager.block_size))


@fault(KVCacheManager, "get_blocks")
def tells_of_one_group(blocks: Any, manager: KVCacheManager, request_id: str) -> Any:
    """Hands out the blocks of the first group alone."""
    found = blocks(manager, request_id)
    return type(found)(found.blocks[:1])


class TakesTheRunningState(HybridConnector):
    """Stores the latest state under the key of every block that the step completed: it is that of the last one only."""

    def _shares(self, tracked: Tracked, start: int, end: int) -> Iterator[Share]:
        for share in super()._shares(tracked, start, end):
            latest = next(
                (block for block in reversed(tracked.tables[share.part.number]) if block), 0
            )
            yield (
                replace(share, slots=(latest,)) if share.part.recurrent and self._saving else share
            )

    _saving = False

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        self._saving = True
        try:
            return super()._plan_save(tracked, end, scheduled, final)
        finally:
            self._saving = False


_offered: dict[int, Any] = {}


@fault(KVCacheManager, "take_boundary_state_offloads")
def offers_states_again(take: Any, manager: KVCacheManager) -> Any:
    """Offers the boundary states of the step before once more."""
    now = take(manager)
    before, _offered[id(manager)] = _offered.get(id(manager), {}), now
    return {**before, **now}
