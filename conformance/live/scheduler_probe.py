# SPDX-License-Identifier: Apache-2.0
"""Watches vLLM's own scheduler in a running engine.

The events are the same as on engine `vllm`, and come from the same observer and ledger.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvconform.compat.step import blocks_to_zero
from kvconform.compat.vllm_api import RequestStatus
from kvconform.contract.events import run_end
from kvconform.contract.trace import Event, Trace
from kvconform.kv.oracle import Loads
from kvconform.kv.provenance import HandedOut, Identity, Memory
from kvconform.live.entry import Entries
from kvconform.live.job import JOB, SHARED
from kvconform.live.state import (
    ATTRIBUTE,
    Flight,
    Granted,
    Known,
    Named,
    Roster,
    Share,
    StepNote,
    described,
    shape_of,
)
from kvconform.observe.inspector import inspector_of, shows_plans
from kvconform.observe.ledger import Ledger, RankReports, counted
from kvconform.observe.observer import Observer
from kvconform.observe.probe import Probe
from kvconform.observe.statistics import Statistics
from kvconform.observe.telemetry import HashBook, Telemetry, Watch
from kvconform.observe.view import block_tables


class LiveView:
    """The kvconform.observe.view.SchedulerView of a running vLLM."""

    # Every worker process has its own probe.
    other_loads: Sequence[Loads] = ()

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.loads = Loads(shape_of(scheduler.kv_cache_config))
        self.roster = Roster(self.loads.shape.block_size)
        self.flight: deque[Flight] = deque()

    def generation(self, req_id: str) -> int:
        """See SchedulerView."""
        return self.roster.generation(req_id)

    def identity(self, req_id: str) -> Identity:
        """See SchedulerView."""
        return self.roster.identity(req_id)

    def valid_end(self, req_id: str) -> int:
        """See SchedulerView."""
        known = self.roster.known.get(req_id)
        if known is None:
            return 0
        end = known.valid_end
        for flight in self.flight:
            for share in flight.shares:
                if share.req == req_id:
                    start = share.start if share.fresh else min(share.start, end)
                    end = start + share.count - share.drafts
        return end

    def held_contents(self) -> set[int]:
        """See SchedulerView."""
        held: set[int] = set()
        for req_id in self.tables():
            request = self.scheduler.requests[req_id]
            if not request.is_finished():
                held.update(self.roster.chain(request)[0][: self.valid_end(req_id)])
        return held

    def tables(self) -> dict[str, list[list[int]]]:
        """See SchedulerView."""
        return block_tables(self.scheduler)

    def in_flight(self) -> list[int]:
        """See SchedulerView."""
        return [id(flight.output) for flight in self.flight]


class SchedulerProbe:
    """Wraps methods of one scheduler, and emits events.

    `together`: the worker is in the same process. `pending`: blocks that became final and are to be
    announced to the workers with the next step. `unseen`: see StepNote, of the next step.
    """

    ended = False
    reports: RankReports | None = None

    def __init__(self, trace: Trace, probe: Probe, scheduler: Any, *, together: bool) -> None:
        self.trace = trace
        self.probe = probe
        self.scheduler = scheduler
        self.together = together
        self.view = LiveView(scheduler)
        self.memory = Memory()
        self.roster = self.view.roster
        self.loads = self.view.loads
        self.flight = self.view.flight
        config = scheduler.vllm_config
        size = getattr(scheduler, "hash_block_size", self.loads.shape.block_size)
        hashes = HashBook(size, self.roster.identity)
        self.watch = Watch(trace, probe, hashes, self.roster.generation)
        self.telemetry = Telemetry(
            trace,
            probe,
            hashes,
            config,
            shared=os.environ.get(SHARED) == "1",
            groups=len(self.loads.shape.groups),
        )
        self.statistics = Statistics(trace, probe, config, alone=self.telemetry.is_alone)
        self.observer = Observer(trace, probe, self.memory, self.view)
        self.inspector: Any = inspector_of(scheduler.connector)
        self.pool = scheduler.kv_cache_manager.block_pool
        is_async = bool(config.scheduler_config.async_scheduling)
        self.ledger = Ledger(trace, self.view, self.observer, is_async=is_async)
        self.blocks_at_start = self.pool.get_num_free_blocks()
        self.pending: list[Named] = []
        self.unseen: list[int] = []
        self.entries = Entries.read(os.environ.get(JOB))
        self._seen_grants = 0
        self._busy = 0
        self._wrap("schedule", self._schedule)
        self._wrap("update_from_output", self._update_from_output)
        self._wrap("add_request", self._add_request)
        self._wrap("finish_requests", self._finish_requests)
        self._wrap("reset_prefix_cache", self._reset_prefix_cache)
        self._cut_sessions_back()

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        """Replace a method of the scheduler by `around(original, ...)`.

        Calls from one wrapped method to another go to the original.
        """
        original = getattr(self.scheduler, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._busy:
                return original(*args, **kwargs)
            Probe.active = self.probe
            self._busy += 1
            try:
                return around(original, *args, **kwargs)
            finally:
                self._busy -= 1

        setattr(self.scheduler, name, wrapped)

    def _cut_sessions_back(self) -> None:
        """Wrap Scheduler._update_request_as_session, which drops tokens that are not computed."""
        original = getattr(self.scheduler, "_update_request_as_session", None)
        if original is None:  # releases without sessions
            return

        def update(session: Any, more: Any) -> None:
            computed = session.num_computed_tokens
            original(session, more)
            self.roster.cut_back(session.request_id, computed)
            if more.mm_features:
                self.roster.extended(session)
                self._identified(session)

        self.scheduler._update_request_as_session = update

    # -- calls
    def _add_request(
        self, original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap Scheduler.add_request. More input of a session is no new request."""
        if request.request_id in self.scheduler.requests:
            self.ledger.before_update()
            result = original(request, *args, **kwargs)
            self.ledger.state_changes("continue")  # the last input ends the session
            return result
        self.roster.add(request)
        self.ledger.added(request)
        self._identified(request)
        if (fields := self.entries.fields(request)) is not None:
            self.trace.emit("live.entered", **fields)
        return original(request, *args, **kwargs)

    def _identified(self, request: Any) -> None:
        """Emit what tells a request apart, if it is more than its tokens."""
        if any((known := described(request)).values()):
            req, generation = request.request_id, self.roster.generation(request.request_id)
            self.trace.emit("request.identity", req=req, generation=generation, **known)

    def _finish_requests(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wrap Scheduler.finish_requests, by which requests are aborted."""
        self.ledger.before_update()
        result = original(*args, **kwargs)
        self.ledger.state_changes("abort")
        return result

    def _reset_prefix_cache(
        self,
        original: Callable[..., Any],
        reset_running_requests: bool = False,
        reset_connector: bool = False,
    ) -> Any:
        """Wrap Scheduler.reset_prefix_cache."""
        self.ledger.before_update()
        asked = {"running": reset_running_requests, "connector": reset_connector}
        self.trace.emit("cache.reset", phase="asked", returned=None, **asked)
        done = original(reset_running_requests, reset_connector)
        for known in self.roster.known.values():
            known.remembered = 0  # what is computed again counts again
        self.trace.emit("cache.reset", phase="done", returned=bool(done), **asked)
        self.ledger.state_changes("reset")
        return done

    def _schedule(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wrap Scheduler.schedule; attach the note for the workers to its output."""
        self.trace.step += 1
        self._settle()
        self.ledger.before_schedule()
        with counted(self.trace, self.scheduler):
            output = original(*args, **kwargs)
        tables = self.view.tables()
        self.ledger.after_schedule(output, tables)
        fresh = self.ledger.take_fresh(tables)
        note = StepNote(
            self.trace.step,
            fresh=fresh,
            wanted=self._wanted(fresh, tables),
            zeroed=blocks_to_zero(output),
        )
        note.tables = {
            req: [block for table in groups for block in table] for req, groups in tables.items()
        }
        note.scheduled = list(output.num_scheduled_tokens)
        launched = self.ledger.launch()
        shares = [self._share(output, launched[req], note, tables) for req in note.scheduled]
        note.granted = self._granted()
        note.named = self.pending
        note.unseen = self.unseen
        self.pending = []
        self.unseen = []
        if self.scheduler.connector is not None:
            note.digest = self.observer.metadata.begin_step(output.kv_connector_metadata)
            if shows_plans(self.inspector):
                for entry in self.inspector.plan(output.kv_connector_metadata):
                    self.observer.planned(entry, None)
        self.observer.activity += 1 if output.total_num_scheduled_tokens else 0
        self.loads.failed_blocks = set()
        self.loads.failed_reqs = set()
        setattr(output, ATTRIBUTE, note)
        self.flight.append(Flight(output, note, shares))
        return output

    def _wanted(self, fresh: list[HandedOut], tables: dict[str, list[list[int]]]) -> dict[int, int]:
        """Return the field `wanted` of a StepNote."""
        size = self.loads.shape.block_size
        handed_out = {each.block for each in fresh}
        found: dict[int, int] = {}
        for req in {each.owner for each in fresh if each.owner in self.scheduler.requests}:
            ids, _ = self.roster.chain(self.scheduler.requests[req])
            for block, end in zip(tables[req][0], range(size, len(ids) + 1, size), strict=False):
                if block in handed_out:
                    found[block] = ids[end - 1]
        return found

    def _share(
        self, output: Any, event: Event, note: StepNote, tables: dict[str, list[list[int]]]
    ) -> Share:
        """Return a request's share of the step, by its req.scheduled event.

        Adds the blocks that it writes to the note.
        """
        req = event["req"]
        share = Share(
            req,
            event["output_computed"],
            event["scheduled"],
            event["drafts"],
            event,
            event["listed_as"] != "cached",
        )
        known = self.roster.known[req]
        request = self.scheduler.requests[req]
        size = self.loads.shape.block_size
        table = tables.get(req, [[]])[0]
        if share.fresh:
            known.admitted(share.start, size)
        end = None if self.scheduler.num_spec_tokens else -(-(share.start + share.count) // size)
        note.written.update(table[min(share.start, self.view.valid_end(req)) // size : end])
        ids, plain = self.roster.chain(request)
        final = min(share.start + share.count - share.drafts, len(ids))
        self.memory.computed(ids[known.remembered : final], plain[known.remembered : final])
        known.remembered = max(known.remembered, final)
        return share

    def _granted(self) -> list[Granted]:
        """Return the loads that were granted since the last call."""
        fresh = self.loads.grants[self._seen_grants :]
        self._seen_grants = len(self.loads.grants)
        size = self.loads.shape.block_size
        found = []
        for grant in fresh:
            request = self.scheduler.requests[grant.req]
            ids, plain = self.roster.chain(request)
            contents = [(ids[end - 1], plain[end - 1]) for end in range(size, len(ids) + 1, size)]
            found.append(
                Granted(
                    grant.transfer,
                    grant.req,
                    grant.generation,
                    grant.start,
                    grant.end,
                    grant.is_async,
                    list(grant.tables[0]),
                    contents,
                    [self.roster.alone(request, index) for index in range(len(contents))],
                    len(ids),
                )
            )
        return found

    def _update_from_output(
        self, original: Callable[..., Any], output: Any, result: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap Scheduler.update_from_output: the step of this output lands."""
        reports = result.kv_connector_output
        self.statistics.landing(reports)
        position = next((n for n, other in enumerate(self.flight) if other.output is output), None)
        if position is None:
            return original(output, result, *args, **kwargs)
        _, note, shares = self.flight[position]
        self._settle(note.step)
        del self.flight[position]
        tables = self.view.tables()
        self.ledger.before_update()
        invalid = set(getattr(reports, "invalid_block_ids", None) or ())
        for share in shares:
            self._landed(share, result, failed=bool(invalid & set(note.tables.get(share.req, ()))))
        objects = {share.req: self.scheduler.requests.get(share.req) for share in shares}
        answer = original(output, result, *args, **kwargs)
        self.ledger.after_update(output, note.step, set())
        for share in shares:
            request = objects[share.req]
            if request is not None and share.req in tables:
                self._name(request, self.roster.known[share.req], tables[share.req][0])
        return answer

    def _landed(self, share: Share, result: Any, *, failed: bool) -> None:
        """Note how far the KV of a request is final, now that the step's tokens are known."""
        known = self.roster.known[share.req]
        before = share.start if share.fresh else known.valid_end
        start = min(share.start, before)
        end = start + share.count - share.drafts
        index = result.req_id_to_index.get(share.req)
        if share.drafts and index is not None and index < len(result.sampled_token_ids):
            end += max(0, len(result.sampled_token_ids[index]) - 1)
        before = min(before, share.start + share.count)
        after = None if failed else end
        self.ledger.executed(share.event, final_before=before, final_after=after)
        known.valid_end = end
        known.tainted = known.tainted or failed

    def _name(self, request: Any, known: Known, table: list[int]) -> None:
        """Announce to the workers, with the next step, blocks that are full and final now."""
        ids, plain = self.roster.chain(request)
        size = self.loads.shape.block_size
        self.memory.computed(
            ids[known.remembered : known.valid_end], plain[known.remembered : known.valid_end]
        )
        known.remembered = max(known.remembered, min(known.valid_end, len(ids)))
        lost = known.tainted or request.status == RequestStatus.PREEMPTED
        for index in range(known.named, min(known.valid_end, len(ids)) // size):
            last = (index + 1) * size - 1
            known.named = index + 1
            if lost or index == known.shared:
                self.unseen.append(ids[last])
                continue
            self.pending.append(
                Named(
                    table[index],
                    ids[last],
                    plain[last],
                    request.request_id,
                    index,
                    tuple(table[:index]),
                    self.roster.alone(request, index),
                )
            )

    # -- the end of loads
    def _settle(self, landed: int = 0) -> None:
        """Close the grants that the engine relies on; mark requests whose load failed.

        `landed`: the step that lands now. In one process, every step that was scheduled before has
        been executed.
        """
        reported = set(self.observer.received)
        self.observer.received = []
        for grant in self.loads.open_grants():
            if grant.is_async:
                grant.open = grant.req in self.scheduler.requests and grant.req not in reported
            elif self.together or grant.started_step <= landed:
                grant.open = False
        for grant in self.loads.grants:
            if grant.failed or grant.given_up:
                known = self.roster.known.get(grant.req)
                if known is not None and known.generation == grant.generation:
                    known.tainted = True

    def join(self, aggregator: Any, outputs: list[Any], rank: int) -> Any:
        """Return what vLLM's aggregator makes of the reports of workers in other processes.

        Emits what each of them reported.
        """
        if self.reports is None:
            count = getattr(aggregator, "_expected_finished_count", None)
            self.reports = RankReports(self.trace, None, len(outputs), count, aggregator)
        for number, output in enumerate(outputs):
            reports = getattr(output, "kv_connector_output", None)
            if reports is not None:
                self.trace.rank = number if len(outputs) > 1 else None
                self._reported_elsewhere(reports)
        self.trace.rank = None
        if len(outputs) > 1:
            return self.reports.join(outputs, rank)
        return aggregator.aggregate(outputs, rank)

    def _reported_elsewhere(self, reports: Any) -> None:
        """Record what a worker in another process reported, in a KVConnectorOutput."""
        before = self.observer.received
        self.observer.reported(reports)
        self.observer.received = [*before, *self.observer.received]
        self.observer.load_errors(set(getattr(reports, "invalid_block_ids", None) or ()))

    def end(self, *, threads: int, crashed: bool) -> Event:
        """Emit run.end.

        An empty step in flight does not count: the front end leaves one when it has all answers.
        """
        live = sorted(self.scheduler.requests)
        left = bool(live) or any(flight.note.scheduled for flight in self.flight)
        fields = run_end(
            quiesced=not left,
            unfinished=live,
            free_blocks=self.pool.get_num_free_blocks(),
            free_blocks_at_start=self.blocks_at_start,
            request_objects_alive=self.ledger.leaked(),
            threads=threads,
            crashed=crashed,
        )
        return self.trace.emit("run.end", **fields)
