# SPDX-License-Identifier: Apache-2.0
"""Where the KV of a request ends: placeholders, unverified drafts, the last token, lookahead slots."""

from __future__ import annotations

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
    """Takes C+S for the end of the KV: counts a token that was scheduled but has no id yet, and drafts that may be rejected (B001)."""

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        return computed + scheduled


class StaleSnapshot(ReferenceConnector):
    """Subtracts the placeholders it saw when the previous step was planned, before that step added its own: one token too far."""

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        tracked = self._tracked[request.request_id]
        snapshot = tracked.__dict__.get("snapshot", 0)
        tracked.__dict__["snapshot"] = request.num_output_placeholders
        return computed - snapshot + scheduled


class OptimisticComputed(ReferenceConnector):
    """Takes C for what is safely computed. With drafts in flight, C counts those that will be rejected (B009)."""

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        return (
            computed
            if computed >= request.num_prompt_tokens
            else super()._save_bound(request, computed, scheduled)
        )


class LastToken(ReferenceConnector):
    """At the end of a request, stores all of its tokens: the last one was sampled, its KV was never computed."""

    def _finish_bound(self, request: Request) -> int:
        return request.num_tokens


class WithoutOwnDrafts(ReferenceConnector):
    """Subtracts this step's drafts from C+S and forgets those of the steps in flight: right until scheduling is asynchronous."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._drafts = scheduler_output.scheduled_spec_decode_tokens
        return super().build_connector_meta(scheduler_output)

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        return computed + scheduled - len(self._drafts.get(request.request_id, ()))


class CountsPlaceholders(ReferenceConnector):
    """Takes the output tokens that the scheduler announces for known ones; under asynchronous scheduling they include placeholders."""

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
    """Stores all blocks that a request has, although the last ones are only reserved for drafts to come (B023, B025)."""

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        return super()._plan_save(tracked, len(tracked.table) * self._block_size, scheduled, final)


class CapturesDrafts(ReferenceConnector):
    """Copies a chunk as soon as all its slots are scheduled, drafts included, and publishes that copy once the token ids are known."""

    _captured: dict[tuple[tuple[int, ...], str], bytes]

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        save, chunk = super()._plan_save(tracked, end, scheduled, final), self.options.chunk_tokens
        start = tracked.saved * chunk
        if not final and tracked.request.num_computed_tokens + scheduled >= start + chunk:
            early = Piece("", 0, slots_of(tracked.table, start, start + chunk, self._block_size))
            return Save(
                save.req,
                save.start,
                save.end,
                (*save.pieces, early),
                tuple(tracked.table),
                final,
                save.counters,
            )
        return save

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        captured: dict[Any, bytes] = self.__dict__.setdefault("_captured", {})
        for piece in save.pieces:
            if piece.key == "":
                captured[piece.slots, layer] = read_slots(kv_layer, piece.slots)
            else:
                self._store.put(
                    epoch,
                    piece.key,
                    layer,
                    captured.pop((piece.slots, layer), b"") or read_slots(kv_layer, piece.slots),
                )
