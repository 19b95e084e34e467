# SPDX-License-Identifier: Apache-2.0
"""The reference connector: a correct KV cache behind vLLM, short enough to start your own from.

The scheduler half decides, the worker half copies. They share only the metadata of each step and
the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.v1.request import RequestStatus

from kvconform.refimpl.cache.chunks import ChunkStore, open_store
from kvconform.refimpl.cache.codecs import codec_named
from kvconform.refimpl.copying import Copying
from kvconform.refimpl.delay import Countdown
from kvconform.refimpl.faults import Faults
from kvconform.refimpl.keys import extend_keys, root_key
from kvconform.refimpl.options import Options
from kvconform.refimpl.paging import NULL_BLOCK, Share, has_window
from kvconform.refimpl.plan import Load, Piece, ReferenceMetadata, Save, cut
from kvconform.refimpl.suite_hooks import SuiteHooks
from kvconform.refimpl.telemetry import COUNTERS, Telemetry
from kvconform.refimpl.tracking import Tracked, first_group, scheduled

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

Lookup = tuple[int | None, bool]
"""Answer of get_num_new_matched_tokens: tokens (None: ask again), whether they load async."""
Finish = tuple[bool, dict[str, Any] | None]
"""Answer of request_finished: whether the blocks stay allocated, and the kv_transfer_params."""


class ReferenceConnector(SuiteHooks, Telemetry, Copying):
    """A best-effort KV cache for models with one group of attention layers.

    See `Options` for its configuration.
    """

    several_groups = False
    options_kind = Options

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) > 1 and not self.several_groups:
            raise ValueError("models with more than one KV cache group are not supported")
        if not self.several_groups and has_window(kv_cache_config):
            raise ValueError(
                "sliding windows are not supported: "
                "blocks that leave the window are freed without notice to the connector"
            )
        self.options = self.options_kind.of(vllm_config)
        self._share = Share.of(vllm_config)
        self._block_size = self._share.block_size
        self._may_save = self._kv_transfer_config.is_kv_producer
        self._may_load = self._kv_transfer_config.is_kv_consumer
        parallel = vllm_config.parallel_config
        self._use(
            open_store(
                self.options.store, parallel.rank, parallel.world_size, self.options.patience
            )
        )
        self._codec = codec_named(self.options.codec)
        self._root = root_key(vllm_config, self.options.codec)

        # Scheduler half.
        # Requests that hold blocks: added when they get them, removed when they lose them.
        self._tracked: dict[str, Tracked] = {}
        # Loads that the engine granted in this step: (request, tokens, asynchronous).
        self._granted: dict[str, tuple[Tracked, int, bool]] = {}
        # Requests with an asynchronous load that the worker has not reported yet.
        self._loading: set[str] = set()
        # For the next step's metadata.
        self._final: list[Save] = []
        self._dropped: set[str] = set()
        self._repaired: set[int] = set()
        self._was_reset = False

        # Worker half.
        self._layers: dict[str, torch.Tensor] = {}
        # Layers that their hook saved in this step.
        self._hooked: set[str] = set()
        # The metadata whose saves are done.
        self._saved: ReferenceMetadata | None = None
        self._load_queue: Countdown[Load] = Countdown()
        self._save_queue: Countdown[tuple[int, Save]] = Countdown()
        # Requests whose last save is done: to be reported.
        self._sent: set[str] = set()
        # Blocks whose load failed: to be reported.
        self._invalid: set[int] = set()
        # Blocks that hold garbage until the engine recomputes them.
        self._bad: set[int] = set()

    def _use(self, store: ChunkStore) -> None:
        """Keep chunks in this store, and let the suite make loads from it fail."""
        self._store = store
        self._faults = Faults(store)

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        found = super().kvconform_capabilities(extra_config)
        if cls is ReferenceConnector:  # a subclass may copy in another way
            found["metrics"] = COUNTERS
        return found

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a lost save only causes a later miss

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise", False))

    # -- Scheduler half: lookup and grant

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        """Return how many more tokens can be loaded, and whether asynchronously.

        The engine asks at every attempt to admit the request, and an allocation may never follow.
        So this changes nothing but what `take_events` reports: that missing chunks are gone.
        """
        if not self._may_load:
            return 0, False
        matched = self._claim(request, self._stored_prefix(request)) - num_computed_tokens
        if matched <= 0:
            return 0, False
        return matched, self.options.load == "async"

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Take note of the request's blocks and of the granted load.

        Called at every admission. After an asynchronous load, the request is admitted a second
        time, without external tokens.
        """
        tracked = Tracked(request, first_group(blocks.get_block_ids()))
        self._tracked[request.request_id] = tracked
        if num_external_tokens > 0:
            self._count("tokens_granted", num_external_tokens)
            is_async = self.options.load == "async"
            self._granted[request.request_id] = (tracked, num_external_tokens, is_async)

    def _stored_prefix(self, request: Request) -> int:
        """Return the length of the longest stored prefix, in tokens.

        Output tokens count too: a request that resumes after a preemption has both.
        """
        keys = self._keys(request, [], request.num_tokens)
        missing = (index for index, key in enumerate(keys) if not self._store.has(key))
        found = next(missing, len(keys))
        self._withdraw(keys[found:])
        return found * self.options.chunk_tokens

    def _claim(self, request: Request, found: int) -> int:
        """Return the position up to which a load may reach.

        A synchronous load leaves one token to compute: its logits are needed for sampling.
        """
        is_async = self.options.load == "async"
        limit = request.num_tokens if is_async else request.num_tokens - 1
        claim = min(found, limit)
        if self.options.whole_blocks:
            claim -= claim % self._block_size
        return claim

    # -- Scheduler half: the plan of a step

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._forget_preempted(scheduler_output.preempted_req_ids or ())
        loads = tuple(self._plan_load(*granted) for granted in self._granted.values())
        planned = (save for save in self._plan_saves(scheduler_output) if save.pieces)
        saves = (*self._final, *planned)
        metadata = ReferenceMetadata(
            self._store.epoch(), loads, saves, frozenset(self._dropped), frozenset(self._repaired)
        )
        self._granted = {}
        self._final = []
        self._dropped = set()
        self._repaired = set()
        for tracked in self._tracked.values():
            tracked.fresh = False
        return metadata

    def _forget_preempted(self, preempted: Iterable[str]) -> None:
        """Forget requests whose blocks the engine has freed.

        A request that was admitted again in the same step already has new blocks: keep those.
        """
        for req_id in preempted:
            self._dropped.add(req_id)
            if req_id in self._tracked and not self._tracked[req_id].fresh:
                del self._tracked[req_id]

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        """Plan the load of `granted` tokens, the last of the request's computed tokens.

        Earlier blocks may be shared with other requests and must not be written.
        """
        request = tracked.request
        end = self._grant_end(request, granted)
        if not end:
            end = min(len(tracked.table) * self._block_size, request.num_tokens)
        start = end - granted
        if is_async:
            self._loading.add(request.request_id)
        pieces = self._pieces(tracked, start, end)
        return self._faults.strike(Load(request.request_id, start, end, pieces, is_async))

    def _grant_end(self, request: Request, granted: int) -> int:
        """Return the position where the grant ends, or 0 if the engine does not show it.

        Until 0.17, vLLM counts the tokens of an asynchronous load only when it has finished, and
        then in whole blocks.
        """
        return request.num_computed_tokens

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> Iterator[Save]:
        chunk = self.options.chunk_tokens
        for req_id, computed, new_blocks, replaces in scheduled(scheduler_output):
            tracked = self._tracked.get(req_id)
            if tracked is None:
                continue
            self._extend_table(tracked, new_blocks, replaces)
            if tracked.fresh and self._was_reset:
                # The engine's own cache may have survived the reset: do not store its KV again.
                tracked.first = -(-computed // chunk)
            # The computed tokens fall back after a failed load.
            tracked.saved = min(tracked.saved, computed // chunk)
            count = scheduler_output.num_scheduled_tokens[req_id]
            end = self._save_bound(tracked.request, computed, count)
            yield self._plan_save(tracked, end, count)

    def _extend_table(
        self, tracked: Tracked, new_blocks: Sequence[Sequence[int]] | None, replaces: bool
    ) -> None:
        if replaces:
            tracked.table = first_group(new_blocks or ())
        elif new_blocks is not None:
            tracked.table += first_group(new_blocks)

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        """Return the end of the KV that is final after the step: min(computed + scheduled, known).

        Beyond it there are only placeholders, drafts and lookahead slots.
        """
        return self._worth_saving(request, min(computed + scheduled, request.num_tokens))

    def _worth_saving(self, request: Request, end: int) -> int:
        return end if self.options.save_decode else min(end, request.num_prompt_tokens)

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        """Plan to save the whole chunks below `end`; advances `tracked`.

        A chunk that this step leaves incomplete is saved by the step that completes it.
        """
        request = tracked.request
        chunk = self.options.chunk_tokens
        start = max(tracked.saved, tracked.first) * chunk
        end -= end % chunk
        pieces: tuple[Piece, ...] = ()
        if self._may_save and not tracked.outdated:
            pieces = tuple(
                piece
                for piece in self._pieces(tracked, start, end)
                if not self._store.has(piece.key)
                and NULL_BLOCK not in piece.blocks(self._block_size)
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

    # -- Scheduler half: the end of a request, reports, reset

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        """Return whether the engine must keep the request's blocks until the worker reports it.

        Called once for every request, whatever its state, even if it never got any blocks.
        """
        req_id = request.request_id
        tracked = self._tracked.pop(req_id, None)
        self._faults.disarm(req_id)
        if tracked is None or req_id in self._loading:
            return False, None  # the report of the load releases the blocks
        is_complete = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        if not block_ids or not is_complete:
            self._dropped.add(req_id)
            return False, None
        tracked.table = list(block_ids)
        save = self._plan_save(tracked, self._finish_bound(request), 0, final=True)
        holds = bool(save.pieces) or (self.options.async_saves and tracked.planned)
        if holds:
            self._final.append(save)
        return holds, None

    def _finish_bound(self, request: Request) -> int:
        """Return the end of the KV that a finished request has: min(computed, known - 1).

        The last token was sampled but never computed, and the computed tokens may count drafts.
        With a pooling model nothing is sampled: all tokens are computed.
        """
        if request.pooling_params is not None:
            return self._worth_saving(request, request.num_computed_tokens)
        return self._worth_saving(request, min(request.num_computed_tokens, request.num_tokens - 1))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._loading -= set(connector_output.finished_recving or ())
        self._repaired |= connector_output.invalid_block_ids

    def reset_cache(self) -> bool | None:
        if not self._store.reset():
            return False  # refused: the store does not respond, or is read-only
        self._was_reset = True
        # The KV in the blocks is as old as the KV that was in the store: do not save it. This goes
        # for live requests and for the last saves of finished ones.
        for tracked in self._tracked.values():
            tracked.outdated = True
        self._final = [replace(save, pieces=()) for save in self._final]
        return True

    # -- Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = {
            name: layer for name, layer in kv_caches.items() if isinstance(layer, torch.Tensor)
        }

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Abandon the saves of dropped requests: their blocks are about to be overwritten.

        The metadata is not bound yet, so it comes as an argument.
        """
        if not isinstance(kv_connector_metadata, ReferenceMetadata):
            return  # a vLLM release that passes ids (see SuiteHooks.bind_connector_metadata)
        dropped = kv_connector_metadata.dropped
        self._save_queue.drop(lambda queued: queued[1].req in dropped and not queued[1].final)
        self._bad -= kv_connector_metadata.repaired
        # What is left was found in the drafter's layers, after the report of their step. The layers
        # of the model had shown it before, and the blocks may belong to others by now.
        self._invalid.clear()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of the step.

        Called in every step. It comes before the forward pass if the step has a synchronous load,
        otherwise after it, or without one.
        """
        layers: Iterable[str] = () if self.options.layerwise else self._layers
        for load in self._metadata().loads:
            if load.is_async:
                self._load_queue.add(load, self.options.load_delay)
            else:
                self._load(load, layers)
        has_forward_pass = forward_context.attn_metadata is not None
        if not has_forward_pass:
            # Until 0.30, vLLM does not call wait_for_save in such a step.
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
        """Save the layers that no hook has saved, or queue the saves of the step.

        Called after all forward passes of the step. `save_kv_layer` is not called without a
        forward pass, nor in one that replays a graph.
        """
        metadata = self._metadata()
        if metadata is not self._saved:
            layers = [layer for layer in self._layers if layer not in self._hooked]
            if self._hooked:
                # Equal requests have the same chunks: the first commit takes all of their layers.
                for save, layer in product(metadata.saves, layers):
                    self._save_layer(metadata.epoch, save, layer, self._layers[layer])
                layers = []
            for save in metadata.saves:
                if self.options.async_saves:
                    # Judged now: when it is made, others may have computed its blocks again.
                    queued = save if self._is_sound(save) else replace(save, pieces=())
                    self._save_queue.add((metadata.epoch, queued), self.options.save_delay)
                else:
                    self._save(metadata.epoch, save, layers)
        self._store.discard()
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
        """Abandon all transfers. May be called twice.

        A chunk that is not committed never becomes visible.
        """
        self._load_queue = Countdown()
        self._save_queue = Countdown()
        self._layers = {}

    def _metadata(self) -> ReferenceMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ReferenceMetadata)
        return metadata

    # -- Scheduler half: keys and pieces

    def _keys(self, request: Request, keys: list[str], end: int) -> Sequence[str]:
        """Append to `keys` the keys of the whole chunks below `end`; return `keys`."""
        return extend_keys(keys, self._root, request, self.options.chunk_tokens, end)

    def _pieces(self, tracked: Tracked, start: int, end: int) -> tuple[Piece, ...]:
        """Cut the positions `[start, end)` of the request at chunk boundaries."""
        chunk = self.options.chunk_tokens
        keys = self._keys(tracked.request, tracked.keys, -(-end // chunk) * chunk)
        return cut(keys, tracked.table, start, end, chunk, self._block_size)
