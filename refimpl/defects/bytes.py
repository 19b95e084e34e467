# SPDX-License-Identifier: Apache-2.0
"""Planted defects: bytes that change on the way, and plans that are doubled, late or wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kvconform.refimpl.connector import Lookup, ReferenceConnector
from kvconform.refimpl.paging import write_slots
from kvconform.refimpl.plan import Load, Piece, ReferenceMetadata, Save
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class LosesPrecision(ReferenceConnector):
    """Loses half of every number, and does not declare that it is lossy (B101, B113)."""

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        data = self._store.get(piece.key, layer)
        if data is None:
            return False
        halved = bytes(byte & 0xF0 for byte in data)
        return write_slots(self._layers[layer], piece.slots, halved, piece.first)


class _Swaps(ReferenceConnector):
    """Reverses the middle axis of every piece that it loads, seen in the given shape."""

    def _shape(self, kv: torch.Tensor) -> tuple[int, int, int]:
        raise NotImplementedError

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        data, kv = self._store.get(piece.key, layer), self._layers[layer]
        if data is None:
            return False
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = raw.view(kv.dtype).view(self._shape(kv)).flip(1).contiguous()
        return write_slots(kv, piece.slots, rows.view(torch.uint8).numpy().tobytes(), piece.first)


class SwapsHalves(_Swaps):
    """Swaps keys and values, as if the layout was not the one that it asked for (B097, B099)."""

    def _shape(self, kv: torch.Tensor) -> tuple[int, int, int]:
        return -1, 2, kv.shape[3] // 2


class SwapsHeads(_Swaps):
    """Loads the heads in another order than they were stored in (B099, B100)."""

    def _shape(self, kv: torch.Tensor) -> tuple[int, int, int]:
        return -1, kv.shape[1], kv.shape[3]


class PlansLoadTwice(ReferenceConnector):
    """Copies the pending loads into the metadata and clears them a step later (B028)."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        again: tuple[Load, ...] = self.__dict__.get("_again", ())
        self._again = metadata.loads
        return replace(metadata, loads=metadata.loads + again)


class SavesLate(ReferenceConnector):
    """Sends the saves of a step with the next step (B010, B012, B022).

    The request of a save may have been preempted in between.
    """

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        late: tuple[Save, ...] = self.__dict__.get("_late", ())
        self._late = tuple(save for save in metadata.saves if not save.final)
        return replace(metadata, saves=late + tuple(save for save in metadata.saves if save.final))


class RecognisesMetadata(ReferenceConnector):
    """Recognises its metadata by identity: the worker half does nothing for a copy (B057)."""

    _built: ClassVar[dict[int, Any]] = {}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        self._built[id(metadata)] = metadata
        return metadata

    def _metadata(self) -> ReferenceMetadata:
        metadata = super()._metadata()
        if self._built.get(id(metadata)) is metadata:
            return metadata
        return replace(metadata, loads=(), saves=())


class ClaimsPlanned(ReferenceConnector):
    """Counts every chunk of a request as stored once one of them is (B001, B032)."""

    def _stored_prefix(self, request: Request) -> int:
        return request.num_tokens if super()._stored_prefix(request) else 0


class AssertsLookup(ReferenceConnector):
    """Asserts that a request resumes at the local count of its first lookup (B019)."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        self.__dict__.setdefault("_expected", {}).setdefault(
            request.request_id, num_computed_tokens
        )
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load = super()._plan_load(tracked, granted, is_async)
        assert load.start == self.__dict__["_expected"][load.req]
        return load


class ReportsAgainAfterDrafting(ReferenceConnector):
    """Loads layer by layer, and reports what the drafter's layer misses with the next step."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        left = set(self._invalid)
        super().handle_preemptions(kv_connector_metadata)
        self._invalid |= left


class PopsDrafterChunk(ReferenceConnector):
    """Gives up the last chunk of every hit when there is speculation (B029).

    It does so for a drafter that does not need it. Short prompts never hit.
    """

    def _stored_prefix(self, request: Request) -> int:
        found = super()._stored_prefix(request)
        if not self._vllm_config.num_speculative_tokens:
            return found
        return max(0, found - self.options.chunk_tokens)


class RefusalEndsPlanning(ReferenceConnector):
    """Stops planning when its store is full, without the new blocks of later requests (B109)."""

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> Iterator[Save]:
        for count, save in enumerate(super()._plan_saves(scheduler_output)):
            if count and save.pieces:
                return  # full: the generator does not reach the other requests
            yield save


class ExpectsHit(ReferenceConnector):
    """Asserts that what its lookup found is still stored when the load is planned (B110)."""

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load = super()._plan_load(tracked, granted, is_async)
        assert all(self._store.has(piece.key) for piece in load.pieces), (
            f"expected {granted} hit tokens"
        )
        return load


class NoFlush(ReferenceConnector):
    """Saves a chunk when the next one is full, and nothing when the request finishes (B111)."""

    def _worth_saving(self, request: Request, end: int) -> int:
        return max(0, super()._worth_saving(request, end) - self.options.chunk_tokens)


class NegativeStart(ReferenceConnector):
    """Counts back from the end of a step by all scheduled tokens, drafts included.

    The plan then begins before the first token.
    """

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        save = super()._plan_save(tracked, end, scheduled, final)
        return replace(save, start=save.end - scheduled - self.options.chunk_tokens)
