# SPDX-License-Identifier: Apache-2.0
"""Planted defects: connectors that mishandle preempted requests, which return with other blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import Lookup, ReferenceConnector
from kvconform.refimpl.plan import Load
from kvconform.refimpl.tracking import Tracked, first_group

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class _RemembersPreempted(ReferenceConnector):
    """Keeps what a preempted request had; only the output of a step changes it."""

    def _forget_preempted(self, preempted: Iterable[str]) -> None:
        self._dropped.update(preempted)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        before = self._tracked.get(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if before is not None:
            self._tracked[request.request_id].table = before.table


class AppendsOnResume(_RemembersPreempted):
    """Appends the blocks of a resumed request to those of before, which others have now (B013)."""

    def _extend_table(
        self, tracked: Tracked, new_blocks: Sequence[Sequence[int]] | None, replaces: bool
    ) -> None:
        blocks = first_group(new_blocks or ())
        if tracked.table != blocks:
            tracked.table += blocks


class KnownIsOld(_RemembersPreempted):
    """Takes a new entry of a known id for a duplicate.

    With model runner V2, it is the resumed request with its new blocks.
    """

    def _extend_table(
        self, tracked: Tracked, new_blocks: Sequence[Sequence[int]] | None, replaces: bool
    ) -> None:
        if not (replaces and tracked.table):
            super()._extend_table(tracked, new_blocks, replaces)


class KeepsStaleTail(_RemembersPreempted):
    """Overwrites the beginning of a table that the engine replaces, and keeps its old tail.

    The tail shows only if the request resumes with fewer blocks than it had: nothing is reused of
    it, and its prompt is computed in chunks.
    """

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        new = first_group(blocks.get_block_ids())
        self._tracked[request.request_id].table[: len(new)] = new

    def _extend_table(
        self, tracked: Tracked, new_blocks: Sequence[Sequence[int]] | None, replaces: bool
    ) -> None:
        if replaces:
            new = first_group(new_blocks or ())
            tracked.table[: len(new)] = new
        else:
            super()._extend_table(tracked, new_blocks, replaces)


class CancelsNewLoad(ReferenceConnector):
    """Drops the load of a request that was preempted and resumed within the same step."""

    def _forget_preempted(self, preempted: Iterable[str]) -> None:
        for req_id in preempted:
            self._tracked.pop(req_id, None)
            self._granted.pop(req_id, None)


class UnfencedSaves(ReferenceConnector):
    """Lets a save under way read blocks that a preemption has given to another request (B010)."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        return


class ResumedIsStored(ReferenceConnector):
    """Saves nothing after a preemption if there were saves before it (B012, B021)."""

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._tracked[request.request_id].outdated = request.num_preemptions > 0


class PromptOnlyLookup(ReferenceConnector):
    """Looks up only the prompt, although a resumed request may have a longer local hit (B044)."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        blocks_of_prompt = (request.num_prompt_tokens - 1) // self._block_size
        found = min(self._stored_prefix(request), blocks_of_prompt * self._block_size)
        return found - num_computed_tokens if found else 0, False


class NothingForResumed(ReferenceConnector):
    """Finds nothing for a request that was preempted, and lets the engine compute it again.

    It announces no KV events, which would show that the KV is stored.
    """

    def take_events(self) -> Iterable[KVCacheEvent]:
        return ()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        if request.num_preemptions:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class LoadsOverLocal(ReferenceConnector):
    """Loads a resumed request from its beginning on, over blocks of the local prefix cache."""

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        if tracked.request.num_preemptions:
            granted = self._grant_end(tracked.request, granted) or granted
        return super()._plan_load(tracked, granted, is_async)


class RemembersItsLoads(ReferenceConnector):
    """Claims for a resumed request what it has loaded for it before, without another look."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._found: dict[str, int] = {}

    def _stored_prefix(self, request: Request) -> int:
        known = self._found.get(request.request_id, 0) if request.num_preemptions else 0
        found = max(known, super()._stored_prefix(request))
        self._found[request.request_id] = found
        return found
