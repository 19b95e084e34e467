# SPDX-License-Identifier: Apache-2.0
"""The reference connector: a correct KV cache behind vLLM, short enough to start your own from.

Its scheduler half decides, its worker half copies; they share nothing but the metadata of each step and the store. Symbols: C, S, N
are a request's computed tokens, this step's scheduled tokens, and its known tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.v1.request import RequestStatus

from kvconform.refimpl.copying import Copying
from kvconform.refimpl.delay import Countdown
from kvconform.refimpl.faults import Faults
from kvconform.refimpl.keys import extend_keys, root_key
from kvconform.refimpl.options import Options
from kvconform.refimpl.paging import NULL_BLOCK, Share
from kvconform.refimpl.plan import Load, Piece, ReferenceMetadata, Save, cut
from kvconform.refimpl.store import open_store
from kvconform.refimpl.suite_hooks import SuiteHooks
from kvconform.refimpl.telemetry import Telemetry
from kvconform.refimpl.tracking import Tracked, first_group, scheduled

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class ReferenceConnector(SuiteHooks, Telemetry, Copying):
    """A best-effort KV cache for models with one group of attention layers. Options: see ``Options``."""

    several_groups = False

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) > 1 and not self.several_groups:
            raise ValueError("models with more than one KV cache group are not supported")
        self.options = Options.of(vllm_config)
        self._share = Share.of(vllm_config)
        self._block_size = self._share.block_size
        self._may_save, self._may_load = (
            self._kv_transfer_config.is_kv_producer,
            self._kv_transfer_config.is_kv_consumer,
        )
        self._store = open_store(
            self.options.store,
            vllm_config.parallel_config.rank,
            vllm_config.parallel_config.world_size,
        )
        self._root = root_key(vllm_config)
        # Scheduler half. Requests enter these maps when they get blocks and leave them when they lose them.
        self._tracked: dict[str, Tracked] = {}
        self._granted: dict[
            str, tuple[Tracked, int, bool]
        ] = {}  # loads of this step: tokens, asynchronous?
        self._loading: set[str] = set()  # asynchronous loads that the worker has not reported yet
        self._final: list[Save] = []
        self._dropped: set[str] = set()
        self._repaired: set[int] = set()
        self._was_reset = False
        self._faults = Faults(self._store)
        # Worker half.
        self._layers: dict[str, torch.Tensor] = {}
        self._hooked: set[str] = set()  # layers that were saved in their hook in this step
        self._saved: ReferenceMetadata | None = None  # whose saves were done
        self._load_queue: Countdown[Load] = Countdown()
        self._save_queue: Countdown[tuple[int, Save]] = Countdown()
        self._sent: set[str] = set()
        self._invalid: set[int] = set()  # to be reported
        self._bad: set[int] = set()  # hold garbage until the engine recomputes them

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a lost save is a later miss, nothing worse

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise", False))

    # ---- Scheduler half: lookup and grant ----

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """A pure question, asked again at every attempt to admit the request, and perhaps never followed by an allocation."""
        if not self._may_load:
            return 0, False
        matched = self._claim(request, self._stored_prefix(request)) - num_computed_tokens
        return (matched, self.options.load == "async") if matched > 0 else (0, False)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Called at every admission: with the granted tokens, and a second time, with none, when an asynchronous load is over."""
        tracked = self._tracked[request.request_id] = Tracked(
            request, first_group(blocks.get_block_ids())
        )
        if num_external_tokens > 0:
            self._granted[request.request_id] = (
                tracked,
                num_external_tokens,
                self.options.load == "async",
            )

    def _stored_prefix(self, request: Request) -> int:
        """Tokens of the longest stored prefix. Of the prompt and the output: a resumed request has both."""
        keys = self._keys(request, [], request.num_tokens)
        found = next(
            (index for index, key in enumerate(keys) if not self._store.has(key)), len(keys)
        )
        self._withdraw(keys[found:])
        return found * self.options.chunk_tokens

    def _claim(self, request: Request, found: int) -> int:
        """How far a load may reach. A synchronous one leaves a token to compute, for there must be something to sample from."""
        limit = request.num_tokens - (0 if self.options.load == "async" else 1)
        return (
            min(found, limit) // self._block_size * self._block_size
            if self.options.whole_blocks
            else min(found, limit)
        )

    # ---- Scheduler half: the plan of a step ----

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._forget_preempted(scheduler_output.preempted_req_ids or ())
        loads = tuple(self._plan_load(*granted) for granted in self._granted.values())
        saves = (
            *self._final,
            *(save for save in self._plan_saves(scheduler_output) if save.pieces),
        )
        metadata = ReferenceMetadata(
            self._store.epoch(), loads, saves, frozenset(self._dropped), frozenset(self._repaired)
        )
        self._granted, self._final, self._dropped, self._repaired = {}, [], set(), set()
        for tracked in self._tracked.values():
            tracked.fresh = False
        return metadata

    def _forget_preempted(self, preempted: Iterable[str]) -> None:
        """Their blocks belong to somebody else now. One that came back within the same step already has new blocks: keep those."""
        for req_id in preempted:
            self._dropped.add(req_id)
            if req_id in self._tracked and not self._tracked[req_id].fresh:
                del self._tracked[req_id]

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        """The grant ends where the request's computed tokens end now. Blocks before it are shared with others: never written."""
        request = tracked.request
        end = self._grant_end(request, granted) or min(
            len(tracked.table) * self._block_size, request.num_tokens
        )
        if is_async:
            self._loading.add(request.request_id)
        return self._faults.strike(
            Load(
                request.request_id,
                end - granted,
                end,
                self._pieces(tracked, end - granted, end),
                is_async,
            )
        )

    def _grant_end(self, request: Request, granted: int) -> int:
        """Zero for asynchronous loads until 0.17, which counts them when they are over, and then by whole blocks."""
        return request.num_computed_tokens

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> Iterator[Save]:
        for req_id, computed, new_blocks, replaces in scheduled(scheduler_output):
            tracked = self._tracked.get(req_id)
            if tracked is not None:
                self._extend_table(tracked, new_blocks, replaces)
                if (
                    tracked.fresh and self._was_reset
                ):  # the engine's own cache may have survived the reset: its KV is not stored again
                    tracked.first = -(-computed // self.options.chunk_tokens)
                tracked.saved = min(
                    tracked.saved, computed // self.options.chunk_tokens
                )  # C falls back when a load has failed
                count = scheduler_output.num_scheduled_tokens[req_id]
                yield self._plan_save(
                    tracked, self._save_bound(tracked.request, computed, count), count
                )

    def _extend_table(
        self, tracked: Tracked, new_blocks: Sequence[Sequence[int]] | None, replaces: bool
    ) -> None:
        if replaces:
            tracked.table = first_group(new_blocks or ())
        elif new_blocks is not None:
            tracked.table += first_group(new_blocks)

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        """KV is final for [0, min(C+S, N)) once the step is over: what lies beyond is a placeholder, a draft or a lookahead slot."""
        return self._worth_saving(request, min(computed + scheduled, request.num_tokens))

    def _worth_saving(self, request: Request, end: int) -> int:
        return end if self.options.save_decode else min(end, request.num_prompt_tokens)

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        """Whole chunks only; one that this step leaves incomplete is completed by a later step. Advances ``tracked``."""
        request, chunk = tracked.request, self.options.chunk_tokens
        start, end = max(tracked.saved, tracked.first) * chunk, end - end % chunk
        pieces = (
            self._pieces(tracked, start, end) if self._may_save and not tracked.outdated else ()
        )
        pieces = tuple(
            piece
            for piece in pieces
            if not self._store.has(piece.key) and NULL_BLOCK not in piece.blocks(self._block_size)
        )
        tracked.saved = max(tracked.saved, end // chunk)
        tracked.planned |= self._expect(tracked, pieces)
        counters = (
            request.num_computed_tokens,
            scheduled,
            request.num_tokens,
            request.num_output_placeholders,
        )
        table = tuple(tracked.table[: -(-end // self._block_size)]) if pieces else ()
        return Save(request.request_id, start, end, pieces, table, final, counters)

    # ---- Scheduler half: the end of a request, reports, reset ----

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Called once for every request in whatever state, also for those never seen before. True keeps the blocks until we report."""
        req_id = request.request_id
        tracked = self._tracked.pop(req_id, None)
        self._faults.disarm(req_id)
        if tracked is None or req_id in self._loading:
            return False, None  # the report of the load releases the blocks
        if not block_ids or request.status not in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        ):
            self._dropped.add(req_id)
            return False, None
        tracked.table = list(block_ids)
        save = self._plan_save(tracked, self._finish_bound(request), 0, final=True)
        holds = bool(save.pieces) or (self.options.async_saves and tracked.planned)
        if holds:
            self._final.append(save)
        return holds, None

    def _finish_bound(self, request: Request) -> int:
        """The last token was sampled but never computed, and C may count drafts: [0, min(C, N-1)) is what exists."""
        return self._worth_saving(request, min(request.num_computed_tokens, request.num_tokens - 1))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._loading -= set(connector_output.finished_recving or ())
        self._repaired |= connector_output.invalid_block_ids

    def reset_cache(self) -> bool | None:
        self._was_reset = True
        self._store.reset()
        for (
            tracked
        ) in self._tracked.values():  # the KV in their blocks is as old as what was in the store
            tracked.outdated = True
        self._final = [
            replace(save, pieces=()) for save in self._final
        ]  # nor are the last saves of requests that are over
        return True

    # ---- Worker half ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = {
            name: layer for name, layer in kv_caches.items() if isinstance(layer, torch.Tensor)
        }

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Nothing is bound yet, and the blocks of ``dropped`` requests are about to be overwritten: abandon what still reads them."""
        if not isinstance(kv_connector_metadata, ReferenceMetadata):
            return  # a release that passes ids here (SuiteHooks.bind_connector_metadata)
        dropped = kv_connector_metadata.dropped
        self._save_queue.drop(lambda queued: queued[1].req in dropped and not queued[1].final)
        self._bad -= kv_connector_metadata.repaired

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called in every step, with or without a forward pass; after it, unless the step needs a synchronous load."""
        for load in self._metadata().loads:
            if load.is_async:
                self._load_queue.add(load, self.options.load_delay)
            else:
                self._load(load, () if self.options.layerwise else self._layers)
        if (
            forward_context.attn_metadata is None
        ):  # no forward pass; releases until 0.30 do not call wait_for_save then
            self.wait_for_save()

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self.options.layerwise:
            for load in self._metadata().loads:
                if not load.is_async:
                    self._load(load, (layer_name,))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self.options.layerwise and not self.options.async_saves:
            self._hooked.add(layer_name)
            for save in self._metadata().saves:
                self._save_layer(self._metadata().epoch, save, layer_name, kv_layer)

    def wait_for_save(self) -> None:
        """After all forward passes of the step. Layers that no hook saved (no forward pass, a drafter's layers) are saved here."""
        metadata = self._metadata()
        for save in metadata.saves if metadata is not self._saved else ():
            if self.options.async_saves:
                self._save_queue.add((metadata.epoch, save), self.options.save_delay)
            else:
                self._save(
                    metadata.epoch,
                    save,
                    [layer for layer in self._layers if layer not in self._hooked],
                )
        self._hooked.clear()
        self._saved = metadata

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loads = self._load_queue.poll()
        for load in loads:
            self._load(load, self._layers)
        for epoch, save in self._save_queue.poll():
            self._save(epoch, save, self._layers)
        sent, self._sent = self._sent, set()
        return sent or None, {load.req for load in loads} or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def shutdown(self) -> None:
        """May come twice, and with transfers under way: they are abandoned, an uncommitted chunk is never seen."""
        self._load_queue, self._save_queue = Countdown(), Countdown()
        self._layers = {}

    def _metadata(self) -> ReferenceMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ReferenceMetadata)
        return metadata

    def _keys(self, request: Request, keys: list[str], end: int) -> Sequence[str]:
        return extend_keys(keys, self._root, request, self.options.chunk_tokens, end)

    def _pieces(self, tracked: Tracked, start: int, end: int) -> tuple[Piece, ...]:
        chunk = self.options.chunk_tokens
        keys = self._keys(tracked.request, tracked.keys, -(-end // chunk) * chunk)
        return cut(keys, tracked.table, start, end, chunk, self._block_size)
