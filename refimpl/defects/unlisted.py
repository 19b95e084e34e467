# SPDX-License-Identifier: Apache-2.0
"""Mistakes that nobody had listed when the requirements were written: do they find what they were not made for?"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.keys import extend_keys
from kvconform.refimpl.plan import Load, Save
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class NeverFinds(ReferenceConnector):
    """Stores chunks and does not enter them where lookups search (vllm#53498)."""

    def _stored_prefix(self, request: Request) -> int:
        return 0


class FromTheChunksStart(ReferenceConnector):
    """Begins a load where the chunk begins in which the local hit ends (LMCache#2206)."""

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load, chunk = super()._plan_load(tracked, granted, is_async), self.options.chunk_tokens
        start = load.start // chunk * chunk
        return replace(load, start=start, pieces=self._pieces(tracked, start, load.end))


class OneSavePerRequest(ReferenceConnector):
    """Keeps track of one save per request: a later one takes the place of one that is under way (LMCache#3640)."""

    def wait_for_save(self) -> None:
        reqs = {save.req for save in self._metadata().saves}
        self._save_queue.drop(lambda queued: queued[1].req in reqs and not queued[1].final)
        super().wait_for_save()


class KeepsLookups(ReferenceConnector):
    """Keeps what a lookup has found until the allocation, which an aborted request never has (vllm#44100)."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.__dict__.setdefault("_found", {})[request.request_id] = (request, found)
        return found

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.__dict__["_found"].pop(request.request_id, None)
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class LetsGoWhileSaving(ReferenceConnector):
    """Does not keep the blocks of a finished request while a save still reads them."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
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
    """Hands out its own set of failed blocks, and empties it in the next step: the engine may not have read it yet."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        live: set[int] = self.__dict__.setdefault("_live", set())
        live.clear()
        live |= super().get_block_ids_with_load_errors()
        return live


class AdapterByNumber(ReferenceConnector):
    """Puts the number of the adapter into the key, which is another one's in the next process."""

    def _keys(self, request: Request, keys: list[str], end: int) -> Sequence[str]:
        names = ("all_token_ids", "cache_salt", "mm_features", "prompt_embeds")
        lora: Any = request.lora_request
        number = (
            None if lora is None else SimpleNamespace(lora_name=str(lora.lora_int_id), lora_path="")
        )
        seen: Any = SimpleNamespace(
            **{name: getattr(request, name) for name in names}, lora_request=number
        )
        return extend_keys(keys, self._root, seen, self.options.chunk_tokens, end)


class SearchesFromTheEnd(ReferenceConnector):
    """Searches the last stored chunk: it does not notice that one before it is gone."""

    def _stored_prefix(self, request: Request) -> int:
        keys = self._keys(request, [], request.num_tokens)
        found = next(
            (index for index in range(len(keys), 0, -1) if self._store.has(keys[index - 1])), 0
        )
        return found * self.options.chunk_tokens


class ThreadPerRequest(ReferenceConnector):
    """Starts a thread for every request, and ends none."""

    def on_new_request(self, request: Request) -> None:
        threading.Thread(target=threading.Event().wait, args=(60.0,), daemon=True).start()


class CountsAtTheGrant(ReferenceConnector):
    """Reads where a load begins when it is granted: the request does not count its local hit yet."""

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.__dict__.setdefault("_begins", {})[request.request_id] = request.num_computed_tokens

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load, start = (
            super()._plan_load(tracked, granted, is_async),
            self.__dict__["_begins"][tracked.request.request_id],
        )
        return replace(
            load,
            start=start,
            end=start + granted,
            pieces=self._pieces(tracked, start, start + granted),
        )
