# SPDX-License-Identifier: Apache-2.0
"""Planted defects that were not on the list when the requirements were written."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector
from kvconform.refimpl.keys import extend_keys
from kvconform.refimpl.plan import Load, Save
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class NeverFinds(ReferenceConnector):
    """Stores chunks, and does not register them for lookups (vllm#53498)."""

    def _stored_prefix(self, request: Request) -> int:
        return 0


class FromTheChunksStart(ReferenceConnector):
    """Starts a load at the start of the chunk in which the local hit ends (LMCache#2206)."""

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load = super()._plan_load(tracked, granted, is_async)
        start = load.start - load.start % self.options.chunk_tokens
        return replace(load, start=start, pieces=self._pieces(tracked, start, load.end))


class OneSavePerRequest(ReferenceConnector):
    """Tracks one save per request: a later save replaces the one under way (LMCache#3640)."""

    def wait_for_save(self) -> None:
        reqs = {save.req for save in self._metadata().saves}
        self._save_queue.drop(lambda queued: queued[1].req in reqs and not queued[1].final)
        super().wait_for_save()


class KeepsLookups(ReferenceConnector):
    """Keeps the result of a lookup until the allocation (vllm#44100).

    A request that is aborted has no allocation.
    """

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.__dict__.setdefault("_found", {})[request.request_id] = (request, found)
        return found

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.__dict__["_found"].pop(request.request_id, None)
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class LetsGoWhileSaving(ReferenceConnector):
    """Releases the blocks of a finished request while a save still reads them."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        super().request_finished(request, block_ids)
        self._final = [replace(save, final=False) for save in self._final]
        return False, None


class SentWhenQueued(ReferenceConnector):
    """Reports a request as sent when its last save is queued."""

    def wait_for_save(self) -> None:
        fresh = self._metadata() is not self._saved
        super().wait_for_save()
        self._sent |= {save.req for save in self._metadata().saves if save.final and fresh}

    def _save(self, epoch: int, save: Save, layers: Any) -> None:
        super()._save(epoch, replace(save, final=False), layers)


class LiveErrors(ReferenceConnector):
    """Returns its own set of failed blocks, and clears it in the next step.

    The engine may not have read it by then.
    """

    def get_block_ids_with_load_errors(self) -> set[int]:
        live: set[int] = self.__dict__.setdefault("_live", set())
        live.clear()
        live |= super().get_block_ids_with_load_errors()
        return live


class AdapterByNumber(ReferenceConnector):
    """Puts the adapter's number into the key, which differs between processes."""

    def _keys(self, request: Request, keys: list[str], end: int) -> Sequence[str]:
        names = ("all_token_ids", "cache_salt", "mm_features", "prompt_embeds")
        lora: Any = request.lora_request
        number = None
        if lora is not None:
            number = SimpleNamespace(lora_name=str(lora.lora_int_id), lora_path="")
        others = {name: getattr(request, name) for name in names}
        seen: Any = SimpleNamespace(**others, lora_request=number)
        return extend_keys(keys, self._root, seen, self.options.chunk_tokens, end)


class SearchesFromTheEnd(ReferenceConnector):
    """Searches for the last stored chunk, and does not notice a missing chunk before it."""

    def _stored_prefix(self, request: Request) -> int:
        keys = self._keys(request, [], request.num_tokens)
        stored = (count for count in range(len(keys), 0, -1) if self._store.has(keys[count - 1]))
        return next(stored, 0) * self.options.chunk_tokens


class ThreadPerRequest(ReferenceConnector):
    """Starts a thread for every request, and ends none of them."""

    def on_new_request(self, request: Request) -> None:
        threading.Thread(target=threading.Event().wait, args=(60.0,), daemon=True).start()


class CountsAtTheGrant(ReferenceConnector):
    """Reads the start of a load at the grant, when the request does not count its local hit yet."""

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.__dict__.setdefault("_begins", {})[request.request_id] = request.num_computed_tokens

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load = super()._plan_load(tracked, granted, is_async)
        start = self.__dict__["_begins"][tracked.request.request_id]
        end = start + granted
        return replace(load, start=start, end=end, pieces=self._pieces(tracked, start, end))
