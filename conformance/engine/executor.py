# SPDX-License-Identifier: Apache-2.0
"""Executes SchedulerOutputs on all ranks of an engine, and joins the ranks' reports."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvconform.contract.case import Variant
from kvconform.contract.trace import Event, Trace
from kvconform.engine.fault import check_starts
from kvconform.engine.lifecycle import in_order
from kvconform.engine.ranks import Rank
from kvconform.engine.view import EngineView, Flight
from kvconform.kv import device
from kvconform.kv.oracle import Grant, Oracle
from kvconform.kv.provenance import Chain
from kvconform.observe.cache import CacheObserver
from kvconform.observe.call import Call
from kvconform.observe.digest import pickle_round_trip
from kvconform.observe.inspector import inspector_of, shows_cache, shows_plans
from kvconform.observe.ledger import Ledger, RankReports
from kvconform.observe.observer import Observer, added_ends, emit_layer
from kvconform.observe.probe import Probe

JUDGED_AFTER = (
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "save_kv_layer",
    "bind_connector_metadata",
)
"""Hooks in which a connector may write KV."""
OPTIONAL_REPORTS = ("kv_connector_stats", "kv_cache_events", "kv_connector_worker_meta")
"""Fields of a KVConnectorOutput that hold objects of the connector's own."""
SIBLINGS_LOAD_IN = ("start_load_kv", "get_transfer_results", "get_finished")
"""Hooks in which siblings in a MultiConnector write KV."""


class Executor:
    """Drives the workers through steps. `execute` changes caches, batch and trace."""

    def __init__(
        self,
        variant: Variant,
        trace: Trace,
        view: EngineView,
        observer: Observer,
        ledger: Ledger,
        *,
        reports: RankReports | None,
        pickled: bool,
    ) -> None:
        """Create the executor.

        `reports` joins several ranks' reports. `pickled`: each step's metadata and what a worker
        reports are copies that went through pickle, as with several ranks.
        """
        self.trace = trace
        self.view = view
        self.ranks = view.ranks
        self.observer = observer
        observer.sees_arrivals = True
        self.ledger = ledger
        self.reports = reports
        self.pickled = pickled
        self._block_size = variant.block_size
        self.progress = 0
        """Counts the steps that computed something or finished a load."""
        self._overlaps = variant.scheduling == "async" and variant.depth > 1
        self._late = variant.late
        self._received: set[str] = set()  # requests whose asynchronous load was just reported
        # Whether the compute stream waited for all work that a layer hook gave to other streams.
        self._joined = device.current.copies()
        self.inspector: Any = inspector_of(view.scheduler.connector)
        self.cache: CacheObserver | None = None
        if shows_cache(self.inspector):
            requests = view.scheduler.requests
            self.cache = CacheObserver(
                trace,
                self.inspector,
                requests,
                variant.block_size,
                self._kv_bytes,
                quantised=self.ranks.members[0].cache.dtype.itemsize == 1,
            )

    @property
    def _oracle(self) -> Oracle:
        return self.view.loads

    def _kv_bytes(self) -> int:
        """Return the bytes that all different KV of the run takes in the memory of the ranks."""
        caches = [rank.cache for rank in self.ranks.members]
        per_token = sum(
            cache.slot_bytes(layer) for cache in caches for layer in range(len(cache.tensors))
        )
        return len(self.observer.memory.ever) * per_token

    # -- hooks
    def listen(self, probe: Probe) -> None:
        """Judge the connector's writes after every hook that may write, and poison fresh blocks."""
        # Until 0.19 handle_preemptions is not called in every step: loads begin before it.
        probe.on("handle_preemptions", after=lambda call: self._worker.poison_fresh())
        probe.on("start_load_kv", before=self._poison_late)
        for hook in ("wait_for_layer_load", "save_kv_layer"):
            probe.on(hook, before=self._before_layer_hook, after=self._layer_hook)
        for hook in JUDGED_AFTER:
            probe.on(hook, after=lambda call: self._oracle.check_writes(call.hook))
        probe.around_siblings = self._around_sibling
        probe.on("get_transfer_results", after=self._note_received)
        probe.on("update_connector_output", after=self._received_late)
        if device.current.streamed:
            probe.after_any.append(self._device_notes)
        if self.cache is not None:
            self.cache.listen(probe)

    @property
    def _worker(self) -> Any:
        return self.ranks.current.worker

    @contextmanager
    def _around_sibling(self, hook: str) -> Iterator[None]:
        """Tell a sibling's writes from those of the connector before them."""
        if hook not in SIBLINGS_LOAD_IN:
            yield
            return
        self._oracle.check_writes(hook)
        yield
        self._oracle.written_by_sibling(hook)

    def _poison_late(self, call: Call) -> None:
        if self._worker.fresh:
            self._worker.poison_fresh()

    def _before_layer_hook(self, call: Call) -> None:
        self._joined = device.current.copies()

    def _layer_hook(self, call: Call) -> None:
        cache = self._oracle.cache
        tensors = dict(zip(cache.names, cache.tensors, strict=True))
        emit_layer(self.trace, call, tensors, joined=self._joined())

    def _note_received(self, call: Call) -> None:
        """Note the asynchronous loads that were reported: the engine may rely on them now."""
        if call.legal:
            self._received = set(call.result.finished_recving or ())

    def _received_late(self, call: Call) -> None:
        """Judge the loads, on every rank, whose end the scheduler half has reported."""
        reported = {req for direction, req in added_ends(call) if direction == "recv"}
        for rank in self.ranks.members if reported else ():
            with self.ranks.driving(rank):
                self._oracle.check_writes(call.hook)
                self._received = reported
                self._due(self._oracle, waiting_only=True)
        if reported:
            self.progress += 1

    def _device_notes(self, call: Call) -> None:
        of_layer = call.hook in ("wait_for_layer_load", "save_kv_layer")
        layer = call.arg(0, "layer_name") if of_layer else None
        for note in device.current.notes():
            self.trace.emit(
                "device.note",
                **note,
                hook=call.hook,
                half=call.half,
                layer=layer,
                forward=bool(self._worker.rows),
            )

    # -- one step
    def plan(self, output: Any) -> str | None:
        """Note what a SchedulerOutput asks of the connector; to be called when it was scheduled.

        Returns the digest that the metadata had when it was built. Workers that get copies get them
        now. EngineFault if a request is to be computed from a negative position.
        """
        check_starts(output)
        self._stirs(output)
        if self.view.scheduler.connector is None:
            return None
        metadata = output.kv_connector_metadata
        digest = self.observer.metadata.begin_step(metadata, copied=self.pickled)
        if shows_plans(self.inspector):
            tables = self.view.tables()
            for entry in self.inspector.plan(metadata):
                self.observer.planned(entry, self._slots(tables.get(entry["req"], [])))
        if self.pickled:
            unpickled, reason = pickle_round_trip(metadata)
            if reason is None:
                output.kv_connector_metadata = unpickled
        return digest

    def _stirs(self, output: Any) -> None:
        """Count a step that may shrink the store, once more when late workers execute it."""
        leader = self.ranks.leader.worker
        failing = any(grant.req in leader.failing for grant in leader.oracle.open_grants())
        # The last saves of a request that has ended take room from others.
        saving = any(request.is_finished() for request in self.view.scheduler.requests.values())
        # What a load finds lost is lost for other requests before it is reported.
        if output.total_num_scheduled_tokens or failing or saving:
            self.observer.activity += 1

    def execute(self, flight: Flight) -> Any:
        """Execute a step; returns the ModelRunnerOutput of the rank that samples."""
        output = flight.output
        self.observer.metadata.current_digest = flight.digest
        leader = self.ranks.leader.worker
        leader.begin(output, flight.fresh)
        tokens = output.total_num_scheduled_tokens
        first = len(self.trace.events)
        self.trace.emit("worker.step_begin")
        self._begin_reports()
        if self._late:
            self._stirs(output)
        leader.scheduled = set(output.num_scheduled_tokens)
        leader.outdated = set()
        if flight.step <= self.observer.reset_after:
            live = self.view.scheduler.requests
            leader.outdated = {req for req in leader.scheduled if req not in live}
        result, failed = self._on_all_ranks(output)
        if self._overlaps:
            for rank in self.ranks.members:
                rank.worker.overlap.take_back()
        for row in leader.rows:
            self._note_final(flight.launched.get(row.state.chain.req), row, failed)
        bound = self._bound_since(first) if len(self.ranks.members) > 1 else []
        if self.cache is not None:
            self.cache.after_step(self.trace.events[first:])
        self.trace.emit("worker.step_end", forward=tokens > 0, ranks=bound)
        if tokens or self._received:
            self.progress += 1
        return result

    def _slots(self, tables: list[list[int]]) -> int | None:
        """Return how many slots a request's block table has; None without blocks or if several."""
        return len(tables[0]) * self._block_size if len(tables) == 1 else None

    def _begin_reports(self) -> None:
        self._oracle.failed_blocks = set()
        self._oracle.failed_reqs = set()
        self._received = set()

    def _on_all_ranks(self, output: Any) -> tuple[Any, set[str]]:
        """Run the step on every rank.

        Returns the output of the rank that samples, and the requests whose loads failed on any.
        """
        metadata = output.kv_connector_metadata
        results: list[Any] = []
        done: list[Rank] = []
        try:
            for rank in self.ranks.members:
                with self.ranks.driving(rank):
                    if self.reports is not None:  # every worker process unpickles its own
                        output.kv_connector_metadata = pickle_round_trip(metadata)[0] or metadata
                    results.append(self._step_of(rank, done, output))
                done.append(rank)
        except BaseException:
            for rank in done:  # what they have shown is true all the same
                with self.ranks.driving(rank):
                    self._settle(rank)
            raise
        output.kv_connector_metadata = metadata
        if self.reports is None:
            joined = results[0]
        else:
            joined = self.reports.join(results)
            self._join_failures(joined.kv_connector_output)
        for rank in self.ranks.members:
            with self.ranks.driving(rank):
                self._settle(rank)
        return in_order(joined), self._failed()

    def _step_of(self, rank: Rank, before: Sequence[Rank], output: Any) -> Any:
        """Run the step on a rank, after those `before`; return its output as it is sent."""
        if rank is not self.ranks.leader:
            rank.worker.begin(output, list(self.ranks.leader.worker.fresh))
        for each in before:
            same_stage = each.place.pp == rank.place.pp
            rank.worker.rest_upon(each.worker, same_stage=same_stage)
        self._begin_reports()
        result = self._sent(rank.lifecycle.step(output))
        self._oracle.check_writes("wait_for_save")
        device.current.finish()
        for grant in self._oracle.open_grants():
            grant.reported |= grant.is_async and grant.req in self._received
        return result

    def _join_failures(self, joined: Any) -> None:
        """Let what a rank reports as not loaded hold for all: the engine takes the union.

        `joined`: the KVConnectorOutput. An asynchronous load is relied on when it ended on all.
        """
        self._received = set(getattr(joined, "finished_recving", None) or ())
        oracles = [rank.worker.oracle for rank in self.ranks.members]
        blocks = set[int]().union(*(oracle.failed_blocks for oracle in oracles))
        reqs = set[str]().union(*(oracle.failed_reqs for oracle in oracles))
        reqs |= set(getattr(joined, "failed_recving", None) or ())
        for oracle in oracles:
            oracle.failed_blocks, oracle.failed_reqs = set(blocks), set(reqs)
            for grant in oracle.open_grants():
                grant.failed |= blocks & grant.blocks

    def _sent(self, result: Any) -> Any:
        """Return a copy of a worker's output as it comes out of the worker's process.

        Emits worker.reports if it has one of OPTIONAL_REPORTS. What does not pickle stays as it is.
        """
        result = copy.copy(result)
        collected = getattr(result, "kv_connector_output", None)
        named = {name: getattr(collected, name, None) for name in OPTIONAL_REPORTS}
        reports = {name: report for name, report in named.items() if report is not None}
        if not reports:
            return result
        copies, reason = pickle_round_trip(reports)
        self.trace.emit(
            "worker.reports", what=[*reports], pickles=reason is None, pickle_error=reason
        )
        if reason is None and (self.pickled or self.reports is not None):
            result.kv_connector_output = copy.copy(collected)
            for name, report in copies.items():
                setattr(result.kv_connector_output, name, report)
        return result

    def _settle(self, rank: Rank) -> None:
        """Judge the loads of a rank's half of the connector, and the reads of its worker.

        Threads, or peers, may have written while later ranks were driven.
        """
        oracle = rank.worker.oracle
        oracle.check_writes("wait_for_save")
        device.current.finish()
        self._due(oracle)
        oracle.settle_reads()
        device.current.step_over()

    def _due(self, oracle: Oracle, *, waiting_only: bool = False) -> None:
        """Close the grants that the engine relies on from now on.

        `waiting_only`: only asynchronous loads are at their end, and no step.
        """
        requests = self.view.scheduler.requests
        for grant in oracle.open_grants():
            state = self.view.batch.requests.get(grant.req)
            if grant.is_async:
                request = requests.get(grant.req)
                if request is None:
                    grant.open = False  # the engine took another rank's report for the last one
                elif grant.req in self._received:  # a failure may be reported in any step before
                    # Of an aborted request, the engine only frees the blocks.
                    needed = not request.is_finished()
                    self._take_up(oracle, grant, self._chain(grant.req), needed=needed)
            elif (
                state is not None
                and not waiting_only
                and grant.req in self.ranks.leader.worker.scheduled
                and grant.started_step <= self.trace.step  # late workers are a step behind
            ):
                self._take_up(oracle, grant, state.chain)

    def _take_up(self, oracle: Oracle, grant: Grant, chain: Chain, *, needed: bool = True) -> None:
        """Judge a load that the engine takes for finished; `needed`: it will use it."""
        oracle.due(grant, chain, needed=needed)
        is_whole = grant.due is None and not grant.failed and not grant.given_up
        if is_whole and grant.end <= len(chain.ids):  # a wrong claim may end behind the tokens
            self.observer.arrived(grant, chain.ids[grant.end - 1])

    def _chain(self, req_id: str) -> Chain:
        """Return the contents of a request's known tokens, computed by a worker or not."""
        info = self.view.info(req_id)
        chain = Chain(req_id, info.generation, info.identity)
        for token in self.view.scheduler.requests[req_id].all_token_ids:
            chain.append(token)
        return chain

    def _failed(self) -> set[str]:
        """Return the requests of this step whose blocks were reported as not loaded."""
        worker = self.ranks.leader.worker
        blocks = worker.oracle.failed_blocks
        rows = worker.rows if blocks else ()
        return {row.state.chain.req for row in rows if blocks & set(row.state.table)}

    def _note_final(self, event: Event | None, row: Any, failed: set[str]) -> None:
        if event is not None:
            before = min(row.before, row.start + row.count)
            after = None if row.state.chain.req in failed else row.known
            self.ledger.executed(event, final_before=before, final_after=after)

    def _bound_since(self, first: int) -> list[int]:
        """Return the ranks whose half was given metadata since event `first`."""
        bound = (
            event
            for event in self.trace.events[first:]
            if event["kind"] == "hook.called" and event["hook"] == "bind_connector_metadata"
        )
        return sorted({event["rank"] for event in bound if event["depth"] == 0})
