# SPDX-License-Identifier: Apache-2.0
"""Planted defects: connectors that misjudge where the KV of a request ends.

The end is blurred by placeholders, unverified drafts, the last token and lookahead slots. C and S
are a request's computed tokens, and those that are scheduled for it in this step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.paging import read_slots, slots_of
from kvconform.refimpl.plan import Piece, Save
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class UnknownToken(ReferenceConnector):
    """Takes C+S for the end of the KV (B001).

    C+S counts a scheduled token without a known id, and drafts that may be rejected.
    """

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        return computed + scheduled


class StaleSnapshot(ReferenceConnector):
    """Subtracts the placeholders from before the previous step added its own: one token too far."""

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        tracked = self._tracked[request.request_id]
        snapshot = tracked.__dict__.get("snapshot", 0)
        tracked.__dict__["snapshot"] = request.num_output_placeholders
        return computed - snapshot + scheduled


class OptimisticComputed(ReferenceConnector):
    """Takes C for what is safely computed (B009).

    With drafts in flight, C counts those that will be rejected.
    """

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        if computed >= request.num_prompt_tokens:
            return computed
        return super()._save_bound(request, computed, scheduled)


class LastToken(ReferenceConnector):
    """Stores all tokens of a request that ends.

    The last one was sampled, and its KV was never computed.
    """

    def _finish_bound(self, request: Request) -> int:
        return request.num_tokens


class MoreTokensThanSlots(LastToken):
    """Stores all tokens of a request that ends, those without a slot, too, in chunks of a token.

    The slots are taken from the table as far as it goes, and the rest is left out without an error.
    """

    def _pieces(self, tracked: Tracked, start: int, end: int) -> tuple[Piece, ...]:
        slots = len(tracked.table) * self._block_size
        found = super()._pieces(tracked, start, min(end, slots))
        keys = self._keys(tracked.request, tracked.keys, end)
        return (*found, *(Piece(key, 0, ()) for key in keys[max(start, slots) : end]))


class WithoutOwnDrafts(ReferenceConnector):
    """Subtracts this step's drafts from C+S, and forgets those of the steps in flight.

    This is right under synchronous scheduling only.
    """

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._drafts = scheduler_output.scheduled_spec_decode_tokens
        return super().build_connector_meta(scheduler_output)

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        return computed + scheduled - len(self._drafts.get(request.request_id, ()))


class CountsPlaceholders(ReferenceConnector):
    """Takes the output tokens that the scheduler counts for known ones.

    Under asynchronous scheduling they include placeholders.
    """

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        cached = scheduler_output.scheduled_cached_reqs
        self._outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        return super().build_connector_meta(scheduler_output)

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        known = request.num_prompt_tokens + self._outputs.get(
            request.request_id, request.num_output_tokens
        )
        return min(computed + scheduled, known)


class LookaheadSlots(ReferenceConnector):
    """Stores all blocks of a request, even those reserved for future drafts (B023, B025)."""

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        return super()._plan_save(tracked, len(tracked.table) * self._block_size, scheduled, final)


class CapturesDrafts(ReferenceConnector):
    """Copies a chunk when all its slots are scheduled, and publishes the copy later.

    The slots may have held drafts; the copy is published when the token ids are known.
    """

    _captured: dict[tuple[tuple[int, ...], str], bytes]

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        save = super()._plan_save(tracked, end, scheduled, final)
        start = tracked.saved * self.options.chunk_tokens
        stop = start + self.options.chunk_tokens
        if final or tracked.request.num_computed_tokens + scheduled < stop:
            return save
        early = Piece("", 0, slots_of(tracked.table, start, stop, self._block_size))
        return replace(save, pieces=(*save.pieces, early), table=tuple(tracked.table))

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        captured: dict[Any, bytes] = self.__dict__.setdefault("_captured", {})
        for piece in save.pieces:
            if piece.key == "":
                captured[piece.slots, layer] = read_slots(kv_layer, piece.slots)
            else:
                data = captured.pop((piece.slots, layer), b"") or read_slots(kv_layer, piece.slots)
                self._store.put(epoch, piece.key, layer, data)
