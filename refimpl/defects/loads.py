# SPDX-License-Identifier: Apache-2.0
"""Planted defects: what a load writes, when, and how its failure is reported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

import torch
from vllm.v1.request import Request

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.delay import Countdown
from kvconform.refimpl.paging import write_slots
from kvconform.refimpl.plan import Load, Piece, ReferenceMetadata, Save
from kvconform.refimpl.tracking import Tracked


class OverLocal(ReferenceConnector):
    """Loads from the beginning of the request, over the local hit that others share (B043)."""

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load = super()._plan_load(tracked, granted, is_async)
        return replace(load, start=0, pieces=self._pieces(tracked, 0, load.end))


class FromFirstBlock(ReferenceConnector):
    """Loads the right chunks into the table's first blocks, over the local hit (B028, B043)."""

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load = super()._plan_load(tracked, granted, is_async)
        slots = (
            block * self._block_size + offset
            for block in tracked.table
            for offset in range(self._block_size)
        )
        shifted = (
            replace(piece, slots=tuple(islice(slots, len(piece.slots)))) for piece in load.pieces
        )
        return replace(load, pieces=tuple(shifted))


class SilentlyPartial(ReferenceConnector):
    """Does not report a missing chunk: its slots keep the bytes of their previous owner (B074)."""

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        for piece in load.pieces:
            for layer in layers:
                self._load_layer(piece, layer)


class GivesUpTheRest(ReferenceConnector):
    """Ends the loads of a step at the first one that fails, and reports nothing of the others."""

    _gave_up = False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._gave_up = False
        super().start_load_kv(forward_context, **kwargs)

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        if not self._gave_up:
            super()._load(load, layers)
            self._gave_up = bool(self._invalid)


class ReportsLate(ReferenceConnector):
    """Reports the failed blocks of a load one step late, when others have computed with them."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        late: set[int] = self.__dict__.get("_late", set())
        self._late = super().get_block_ids_with_load_errors()
        return late


class ClaimsWhatIsLost(ReferenceConnector):
    """Never forgets in its index what a load has not found, so that all who ask for it fail."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._index: set[str] = set()

    def _stored_prefix(self, request: Request) -> int:
        found = super()._stored_prefix(request)
        keys = self._keys(request, [], request.num_tokens)
        self._index.update(keys[: found // self.options.chunk_tokens])
        known = takewhile(self._index.__contains__, keys)
        return sum(self.options.chunk_tokens for _ in known)


class OneMessageOfLoads(ReferenceConnector):
    """Loads as many chunks in a step as one message names, 64, and takes the load for done."""

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        super()._load(replace(load, pieces=load.pieces[:64]), layers)


class OneMessageOfSaves(ReferenceConnector):
    """Saves as many chunks of a step as one message names, 64, and forgets the rest."""

    def _save(self, epoch: int, save: Save, layers: Iterable[str]) -> None:
        super()._save(epoch, replace(save, pieces=save.pieces[:64]), layers)


class ReportsAgain(ReferenceConnector):
    """Does not clear the set of failed blocks, and reports them again in every step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._failed: set[int] = set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._failed |= super().get_block_ids_with_load_errors()
        return set(self._failed)


class FailedIsUnfinished(ReferenceConnector):
    """Reports the blocks of a failed asynchronous load, but not that the load is over (B047)."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        return sent, None if self._invalid else received


class NeedsForward(ReferenceConnector):
    """Loads only when there is attention metadata (B056).

    The only step of an asynchronous load may have none.
    """

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if forward_context.attn_metadata is not None:
            super().start_load_kv(forward_context, **kwargs)


class NoKeywords(ReferenceConnector):
    """Accepts no keyword arguments; model runner V2 passes some (B126)."""

    def start_load_kv(self, forward_context: Any) -> None:  # type: ignore[override]
        super().start_load_kv(forward_context)


class StateFromStart(ReferenceConnector):
    """Saves layers by the plan that it noted in start_load_kv (B128).

    When nothing is loaded, that hook is called after the forward pass.
    """

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self._noted = self._metadata()

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        for save in self._noted.saves:
            self._save_layer(self._noted.epoch, save, layer_name, kv_layer)


class LoadsAfterForward(ReferenceConnector):
    """Performs synchronous loads in wait_for_save, when the layers have already read the blocks."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if forward_context.attn_metadata is None:
            super().start_load_kv(forward_context, **kwargs)
        else:
            self._context = forward_context

    def wait_for_save(self) -> None:
        context, self._context = self.__dict__.get("_context"), None
        if context is not None:
            super().start_load_kv(context)
        super().wait_for_save()


class LayerOrder(ReferenceConnector):
    """Puts the bytes of the first layer into all layers."""

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        data = self._store.get(piece.key, next(iter(self._layers)))
        return data is not None and write_slots(self._layers[layer], piece.slots, data, piece.first)


class _Whole(Load):
    """A load whose last piece is the last token of the request."""


class TakesTheWholeHit(ReferenceConnector):
    """Loads all that it found, and the last token at the end of the step (B039).

    The engine did not grant the last token, and has computed it.
    """

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load = super()._plan_load(tracked, granted, is_async)
        known = tracked.request.num_tokens
        if load.end < known - 1:
            return load
        pieces = (*load.pieces, *self._pieces(tracked, known - 1, known))
        return _Whole(load.req, load.start, known, pieces, is_async)

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        if isinstance(load, _Whole):
            load = replace(load, pieces=load.pieces[:-1])
        super()._load(load, layers)

    def wait_for_save(self) -> None:
        for load in self._metadata().loads:
            if isinstance(load, _Whole):
                super()._load(load, self._layers)
        super().wait_for_save()


class WholeChunksOnly(ReferenceConnector):
    """Assumes that a load begins where a chunk begins (B040).

    It begins where the local hit ends: at a block, and blocks are smaller than chunks.
    """

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        assert (tracked.request.num_computed_tokens - granted) % self.options.chunk_tokens == 0
        return super()._plan_load(tracked, granted, is_async)


class OverwritesWhatIsRead(ReferenceConnector):
    """Has a store of SLOTS chunks, and overwrites the oldest one although a load is to read it.

    A chunk's slot is resolved when its load is planned; the load then reads another chunk.
    """

    SLOTS = 6

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._stored: dict[str, None] = {}
        self._now_in_slot_of: dict[str, str] = {}

    def _save(self, epoch: int, save: Save, layers: Iterable[str]) -> None:
        super()._save(epoch, save, layers)
        for piece in save.pieces:
            self._stored[piece.key] = None
            self._now_in_slot_of.pop(piece.key, None)
            if len(self._stored) > self.SLOTS:
                oldest = next(iter(self._stored))
                del self._stored[oldest]
                self._store.drop(oldest)
                self._now_in_slot_of[oldest] = piece.key

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        moved = self._now_in_slot_of
        pieces = tuple(replace(each, key=moved.get(each.key, each.key)) for each in load.pieces)
        super()._load(replace(load, pieces=pieces), layers)


class SavesAllLayersButOne(ReferenceConnector):
    """Stores no chunk completely, so that every load is reported as failed."""

    def _save(self, epoch: int, save: Save, layers: Iterable[str]) -> None:
        super()._save(epoch, save, list(layers)[:-1])


class FailsBeforeAllHaveStopped(ReferenceConnector):
    """Reports a load as failed when its first transfer fails; the others write later (B138)."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._still_writing: Countdown[Load] = Countdown()

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        found = tuple(piece for piece in load.pieces if self._store.has(piece.key))
        if len(found) == len(load.pieces) or not load.is_async:
            super()._load(load, layers)
            return
        for piece in load.pieces:
            self._invalid |= piece.blocks(self._block_size)
        self._still_writing.add(replace(load, pieces=found), 3)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for load in self._still_writing.poll():
            super()._load(load, self._layers)
        return super().get_finished(finished_req_ids)


class CancelsWhatHasEnded(ReferenceConnector):
    """Cancels the load of an aborted request until it is admitted again, also one that has ended.

    The worker half reports the end of whatever it cancels.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cancelled: set[str] = set()

    def update_connector_output(self, connector_output: Any) -> None:
        self._repaired |= connector_output.invalid_block_ids  # what it awaits, it awaits still

    def update_state_after_alloc(self, request: Request, blocks: Any, external: int) -> None:
        if external == 0:
            self._loading.discard(request.request_id)
        super().update_state_after_alloc(request, blocks, external)

    def request_finished(self, request: Request, block_ids: list[int]) -> Any:
        if request.request_id in self._loading:
            self._cancelled.add(request.request_id)
            self._loading.discard(request.request_id)
            self._tracked.pop(request.request_id, None)
            return False, None
        return super().request_finished(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        cancelled, self._cancelled = self._cancelled, set()
        return _Cancelling(**vars(metadata), cancelled=frozenset(cancelled))

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        metadata: Any = self._metadata()
        for load in self._load_queue.take(lambda load: load.req in metadata.cancelled):
            self._load(load, self._layers)
        return sent, {*(received or ()), *metadata.cancelled} or None


@dataclass(frozen=True)
class _Cancelling(ReferenceMetadata):
    """The plan of a step, and the requests whose loads it cancels."""

    cancelled: frozenset[str] = frozenset()


class SharesFetches(ReferenceConnector):
    """Lets loads of the same content wait for the first; when that one is aborted, all are gone."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        aborted = frozenset(scheduler_output.finished_req_ids) & self._loading
        return _Cancelling(**vars(metadata), cancelled=aborted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        metadata: Any = self._metadata()
        waiting = self._load_queue.take()
        for load in waiting:
            self._load_queue.add(load, self.options.load_delay)
        firsts: dict[str, str] = {}
        for load in waiting:
            firsts.setdefault(load.pieces[0].key if load.pieces else load.req, load.req)
        self._load_queue.drop(
            lambda load: (
                bool(load.pieces) and firsts[load.pieces[0].key] in metadata.cancelled - {load.req}
            )
        )
