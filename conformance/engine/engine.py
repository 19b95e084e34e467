# SPDX-License-Identifier: Apache-2.0
"""What a client or an operator does to an engine between its steps.

One engine: scheduler, worker and both connector halves, driven step by step as vLLM's engine core drives its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from vllm.config import set_current_vllm_config

from kvconform.compat import backports, vllm_api
from kvconform.compat.groups import registered, resolve_layout
from kvconform.compat.vllm_api import DraftTokenIds, RequestStatus
from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.contract.trace import Trace
from kvconform.engine.batch import Batch, Info, Script
from kvconform.engine.halves import introduce, note_engine_ids, noted, refused, start_worker_half
from kvconform.engine.lifecycle import make_lifecycle
from kvconform.engine.ranks import EngineExecution, Follower, Rank, config_of, places, shard, widen
from kvconform.engine.setup import build_cache_config, build_config, build_scheduler, run_id
from kvconform.engine.worker import Worker
from kvconform.kv import device
from kvconform.kv.cache import PagedCache, groups_of
from kvconform.kv.oracle import Oracle
from kvconform.kv.provenance import Identity, Memory, Registry
from kvconform.observe.call import Call
from kvconform.observe.ledger import Joined, Ledger, counted
from kvconform.observe.observer import Observer, emit_layer
from kvconform.observe.probe import Probe
from kvconform.observe.static_checks import bound, inspect_class, inspect_engine, inspect_instance
from kvconform.observe.telemetry import HashBook, Telemetry, Watch


class EngineControl:
    """Requests come, go and are preempted, caches are reset. Every method changes the engine and the trace."""

    trace: Trace
    probe: Probe
    scheduler: Any
    ledger: Ledger

    def add(self, request: Any) -> None:
        """Hand a request to the scheduler."""
        Probe.active = self.probe
        self.ledger.added(request)
        self.scheduler.add_request(request)

    def abort(self, req_id: str) -> None:
        """Abort a request, as a client that goes away."""
        Probe.active = self.probe
        self.ledger.before_update()
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        self.ledger.state_changes("abort")

    def preempt(self, req_id: str) -> bool:
        """Preempt a running request between two steps; False if it is not running or the engine would not do it now (R160)."""
        request = self.scheduler.requests.get(req_id)
        if request is None or request.status != RequestStatus.RUNNING:
            return False
        Probe.active = self.probe
        self.ledger.before_update()
        done = vllm_api.force_preemption(self.scheduler, request)
        self.ledger.state_changes("preempt")
        return done

    def reset(self, *, running: bool, connector: bool) -> bool:
        """reset_prefix_cache; returns what the scheduler returned."""
        Probe.active = self.probe
        self.ledger.before_update()
        done = False
        self.trace.emit(
            "cache.reset", phase="asked", returned=None, running=running, connector=connector
        )
        try:
            done = vllm_api.reset_caches(self.scheduler, running=running, connector=connector)
            self.trace.emit(
                "cache.reset", phase="done", returned=done, running=running, connector=connector
            )
        except RuntimeError as error:
            if self.probe.last_error is not None and self.probe.last_error[1] is error:
                raise
            # The engine refuses while blocks are held for a transfer (R172); whoever asked for the reset is told, and it goes on.
        self.ledger.state_changes("reset")
        return done

    def pause(self, paused: bool) -> None:
        """Stop or resume the admission of new requests."""
        vllm_api.set_paused(self.scheduler, paused)


class Engine(EngineControl, EngineExecution):
    """`info(req_id)` gives the harness's knowledge of a live request. All methods change the engine and the trace."""

    def __init__(
        self,
        variant: Variant,
        target: Target,
        trace: Trace,
        registry: Registry,
        memory: Memory,
        info: Callable[[str], Info],
        tmp: Path,
        *,
        relation: str,
    ) -> None:
        self.variant, self.trace, self.memory, self.info = variant, trace, memory, info
        self.pickle_metadata = relation == "pickled-metadata"
        with_connector = relation != "no-connector" and target.connector is not None
        self.depth = variant.depth if variant.scheduling == "async" else 1
        self.queue: deque[tuple[Any, Any, int, set[str]]] = deque()
        self.probe = Probe(trace)
        Probe.active = self.probe
        settings = variant.case.config
        where = places(settings, with_connector=with_connector)
        try:
            self.config = build_config(variant, target, tmp, with_connector=with_connector)
            layout = resolve_layout(self.config, settings.layout)
        except Exception as error:
            if with_connector:
                refused(trace, target.resolve(), error, getattr(self, "config", None))
            raise
        book = registry.book
        groups = groups_of(
            settings.groups,
            layers=book.layers,
            block_size=variant.block_size,
            heads=book.heads,
            window=settings.window,
        )
        shards = [
            shard(registry, place, settings.num_blocks, variant.block_size, layout, groups)
            for place in where
        ]
        cache = shards[-1][0]
        self.cache_config = build_cache_config(cache)
        given = self.config.kv_transfer_config.engine_id if with_connector else None
        hashes = HashBook(variant.block_size, lambda r: info(r).identity)
        self.watches = (
            Watch(trace, self.probe, hashes, self._generation),
            Telemetry(trace, self.probe, hashes, self.config),
        )
        widen(self.config, where[-1])
        self.ranks = [
            Rank(place, *part, config_of(self.config, place), self._cache_config(part[0]))
            for place, part in zip(where, shards, strict=True)
        ]
        self.worker_half: Any = None
        if with_connector:
            with noted(trace, "start"):
                for rank in self.ranks:
                    with self._as(rank):
                        rank.half = start_worker_half(
                            rank.config, rank.cache_config, rank.cache, target, relation=relation
                        )
            self.worker_half = self.ranks[-1].half
            if variant.case.id in ("lifecycle.api", "finding.multi-stats"):
                for item, ok, detail in inspect_class(
                    target.resolve(), target.options(tmp, variant.block_size), self.config
                ):
                    trace.emit("api", item=item, ok=ok, detail=detail)
                for item, ok, detail in (
                    inspect_engine(self.config, self.cache_config, variant.case.id)
                    if variant.engine == "vllm"
                    else ()
                ):
                    trace.emit("engine.api", item=item, ok=ok, detail=detail)
                if hasattr(
                    self.worker_half, "get_mem_pool_context"
                ):  # asked before the KV tensors are allocated
                    self.worker_half.get_mem_pool_context()
        self.scheduler: Any = None
        self.batch = Batch(variant.block_size, self._incarnation, cache.groups)
        for rank in self.ranks:
            oracle = Oracle(rank.cache, rank.registry, trace, self.held)
            kind = Worker if rank is self.ranks[-1] else Follower
            rank.worker = kind(
                rank.cache, rank.registry, trace, oracle, self.batch, memory.computed
            )
            rank.lifecycle = make_lifecycle(
                variant.engine,
                rank.worker,
                rank.half,
                rank.config,
                runner=variant.runner,
                speculative=settings.spec_tokens > 0,
            )
            with set_current_vllm_config(rank.config), self._as(rank):
                rank.lifecycle.register()
            trace.emit(
                "kv.registered",
                **registered(rank.cache, rank.config, rank.cache_config, settings.layout),
            )
        self.worker = self.ranks[-1].worker
        self.oracle = self.worker.oracle
        for rank in self.ranks[:-1]:
            rank.worker.leader = self.worker
        with noted(trace, "start") if with_connector else nullcontext():
            self.scheduler, self.applied = build_scheduler(
                variant, self.config, self.cache_config, with_connector=with_connector
            )
        self.connector = self.scheduler.connector
        count: int | None = None
        if self.connector is not None:
            count = introduce(self.connector, self.ranks)
            note_engine_ids(trace, given, self.config, self.ranks)
            if variant.case.id == "lifecycle.api":
                called = {
                    e["hook"]
                    for e in trace.events
                    if e["kind"] == "hook.called" and e["half"] == "scheduler"
                }
                for item, ok, detail in (
                    *inspect_instance(self.connector),
                    bound(self.connector, called),
                ):
                    trace.emit("api", item=item, ok=ok, detail=detail)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.observer = Observer(
            trace,
            self.probe,
            self.oracle,
            memory,
            self.scheduler,
            self._generation,
            lambda r: info(r).identity,
            self._valid_end,
            self._held_contents,
        )
        self.observer.private = str(tmp), run_id(tmp)
        self.observer.others = [rank.worker.oracle for rank in self.ranks[:-1]]
        self.aggregator: Joined | None = None
        if len(self.ranks) > 1 and self.connector is not None:
            self.aggregator = Joined(trace, self.connector, len(self.ranks), count)
        self.ledger = Ledger(
            trace,
            self.scheduler,
            self.pool,
            self.observer,
            self.batch.sizes,
            is_async=variant.scheduling == "async",
        )
        self.ledger.in_flight = lambda: [id(step[0]) for step in self.queue]
        self._listen()
        self.blocks_at_start = self.pool.get_num_free_blocks()
        self.progress = 0

    def _cache_config(self, cache: PagedCache) -> Any:
        if cache.names == self.cache_config.kv_cache_groups[0].layer_names:
            return self.cache_config
        return build_cache_config(cache)

    def _generation(self, req_id: str) -> int:
        """Incarnation of a request id; 0 for one that nobody added: a connector may report anything."""
        try:
            return self.info(req_id).generation
        except KeyError:
            return 0

    def _incarnation(self, req_id: str) -> tuple[int, Identity, Script]:
        found = self.info(req_id)
        return found.generation, found.identity, found.script

    def _valid_end(self, req_id: str) -> int:
        state = self.batch.requests.get(req_id)
        return (
            state.valid_end
            if state and state.chain.generation == self.info(req_id).generation
            else 0
        )

    def _held_contents(self) -> set[int]:
        """Content ids of the final KV of live requests, which go on computing upon it; not of what is only kept for a save."""
        held: set[int] = set()
        for req_id in self.tables():
            state = self.batch.requests.get(req_id)
            if state is not None and not self.scheduler.requests[req_id].is_finished():
                held.update(state.chain.ids[: state.valid_end])
        return held

    def _listen(self) -> None:
        # Until 0.19 handle_preemptions is not called in every step: then the blocks are reused when the loads begin.
        self.probe.on("handle_preemptions", after=lambda call: self.worker.poison_fresh())
        self.probe.on(
            "start_load_kv",
            before=lambda call: self.worker.poison_fresh() if self.worker.fresh else None,
        )
        for hook in ("wait_for_layer_load", "save_kv_layer"):
            self.probe.on(hook, after=self._layer_hook)
        for hook in (
            "start_load_kv",
            "wait_for_save",
            "get_transfer_results",
            "save_kv_layer",
            "bind_connector_metadata",
        ):
            self.probe.on(hook, after=lambda call: self.oracle.check_writes(call.hook))
        if {"winner", "fetcher"} & set(
            self.variant.case.config.multi
        ):  # siblings that load, and are listed first, have written by then
            for hook in ("start_load_kv", "get_transfer_results"):
                self.probe.on(hook, before=lambda call: self.oracle.written_by_sibling(call.hook))
        self.probe.on("get_transfer_results", after=self._async_due)
        if device.current.streamed:
            self.probe.after_any.append(self._device_notes)
        inspector = getattr(self.connector, "kvconform_inspector", None)
        self.inspector: Any = inspector() if callable(inspector) else None

    def _layer_hook(self, call: Call) -> None:
        cache = self.oracle.cache
        emit_layer(self.trace, call, dict(zip(cache.names, cache.tensors, strict=True)))

    def _device_notes(self, call: Call) -> None:
        layer = (
            call.arg(0, "layer_name")
            if call.hook in ("wait_for_layer_load", "save_kv_layer")
            else None
        )
        for note in device.current.notes():
            self.trace.emit(
                "device.note",
                **note,
                hook=call.hook,
                half=call.half,
                layer=layer,
                forward=bool(self.worker.rows),
            )

    def _async_due(self, call: Call) -> None:
        """Asynchronous loads that were reported: the engine may rely on them from now on."""
        if not call.legal:
            return
        self.reported_now = set(call.result.finished_recving or ())

    def tables(self) -> dict[str, list[list[int]]]:
        """Block tables of all requests that hold blocks, by request id; one per group."""
        if self.scheduler is None:
            return {}
        manager, tables = self.scheduler.kv_cache_manager, {}
        for req_id in self.scheduler.requests:
            groups = [list(table) for table in manager.get_block_ids(req_id)]
            if any(groups):
                tables[req_id] = groups
        return tables

    def held(self) -> dict[str, list[int]]:
        """Blocks of all requests that hold some, by request id."""
        return {
            req_id: [block for table in groups for block in table]
            for req_id, groups in self.tables().items()
        }

    # -- steps -----------------------------------------------------------------------------------------------------------------
    def schedule(self) -> None:
        """One schedule() and its execution; the output joins the queue."""
        self.trace.step += 1
        Probe.active = self.probe
        self.ledger.before_schedule()
        with counted(self.trace, self.scheduler):
            output = self.scheduler.schedule()
        self.ledger.after_schedule(output, self.tables())
        fresh = self.ledger.take_fresh(self.tables())
        result = self._execute(output, fresh)
        self.queue.append((output, result, self.trace.step, self.worker.corrupt))

    def land(self) -> None:
        """Process the oldest queued output."""
        output, result, step, corrupt = self.queue.popleft()
        if not self.queue:  # the newest: it has sampled its tokens
            device.current.finish()
        Probe.active = self.probe
        self.ledger.before_update()
        drafts = None
        if (
            self.variant.case.config.spec_tokens
            and self.variant.scheduling == "sync"
            and output.num_scheduled_tokens
        ):
            ids = list(output.num_scheduled_tokens)
            drafts = DraftTokenIds(ids, [[2] * self.variant.case.config.spec_tokens for _ in ids])
        self.scheduler.update_from_output(output, result)
        if drafts is not None:
            self.scheduler.update_draft_token_ids(drafts)
        self.ledger.after_update(output, step, corrupt)
        if self.variant.engine == "reference":
            self.scheduler.check_integrity()

    def iterate(self) -> None:
        """One engine-core iteration: sync schedule and land; async keeps up to `depth` steps in the queue."""
        if self.depth <= 1:
            if (
                not self.queue and self._has_requests()
            ):  # what a case has scheduled and not landed is this iteration's step
                self.schedule()
            if self.queue:
                self.land()
            return
        if self._has_requests():
            self.schedule()
            newest = self.queue[-1][0]
            if len(self.queue) < self.depth and (
                newest.total_num_scheduled_tokens > 0 or self._has_requests()
            ):
                return
        if self.queue:
            self.land()

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.queue) or self._has_requests()

    def _has_requests(self) -> bool:
        return bool(self.scheduler.has_requests()) or backports.holds_finished(self.scheduler)

    def shutdown(self, again: bool = False) -> None:
        """Shut both connector halves down, the worker's first."""
        if self.worker_half is None:
            return
        Probe.active = self.probe
        if not again and (used := device.current.used()):
            self.trace.emit("device.used", **used)
        op = "shutdown_again" if again else "shutdown"
        with noted(self.trace, op):
            for rank in self.ranks:
                with self._as(rank):
                    rank.half.shutdown()
            self.connector.shutdown()
