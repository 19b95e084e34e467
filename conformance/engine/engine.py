# SPDX-License-Identifier: Apache-2.0
"""One engine, driven step by step as vLLM's engine core drives its own."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from kvconform.compat import backports, vllm_api
from kvconform.compat.vllm_api import DraftTokenIds, RequestStatus
from kvconform.contract.case import Variant
from kvconform.contract.trace import Trace
from kvconform.engine.executor import Executor
from kvconform.engine.halves import noted
from kvconform.engine.view import EngineView, Flight
from kvconform.kv import device
from kvconform.kv.oracle import Oracle
from kvconform.observe.ledger import Ledger, counted
from kvconform.observe.observer import Observer
from kvconform.observe.probe import Probe
from kvconform.observe.relay import Relay
from kvconform.observe.statistics import Statistics
from kvconform.observe.telemetry import Telemetry, Watch

DRAFT_TOKEN = 2
"""The token that every draft proposes."""


@dataclass(frozen=True)
class EngineParts:
    """Parts of an engine; kvconform.engine.setup.build makes them."""

    variant: Variant
    trace: Trace
    probe: Probe
    scheduler: Any
    view: EngineView
    executor: Executor
    observer: Observer
    ledger: Ledger
    watch: Watch
    telemetry: Telemetry
    statistics: Statistics
    relay: Relay | None


class Engine:
    """Scheduler, ranks and both halves of the connector. All methods change it and the trace."""

    def __init__(self, parts: EngineParts) -> None:
        self.variant = parts.variant
        self.trace = parts.trace
        self.probe = parts.probe
        self.scheduler = parts.scheduler
        self.view = parts.view
        self.executor = parts.executor
        self.observer = parts.observer
        self.ledger = parts.ledger
        self.watch = parts.watch
        self.telemetry = parts.telemetry
        self.statistics = parts.statistics
        self.statistics.seen.cache = parts.executor.cache
        self.relay = parts.relay
        self.ranks = parts.view.ranks
        self.queue = parts.view.queue
        self.connector = parts.scheduler.connector
        self.pool = parts.scheduler.kv_cache_manager.block_pool
        self.blocks_at_start = self.pool.get_num_free_blocks()
        self.depth = parts.variant.depth if parts.variant.scheduling == "async" else 1
        self.late = parts.variant.late
        """Whether workers execute a step only when its output is awaited."""
        self.is_down = False
        self.preempted = False
        """Whether a request was preempted since the last step was scheduled."""

    @property
    def worker(self) -> Any:
        """The worker of the rank that runs now; outside of a step, of the one that samples."""
        return self.ranks.current.worker

    @property
    def oracle(self) -> Oracle:
        """The oracle of that rank."""
        return self.view.loads

    @property
    def inspector(self) -> Any:
        """The connector's Inspector, which reports its plans, or None."""
        return self.executor.inspector

    @property
    def progress(self) -> int:
        """Steps so far that computed something or finished a load."""
        return self.executor.progress

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.queue) or self._has_requests()

    def _has_requests(self) -> bool:
        return bool(self.scheduler.has_requests()) or backports.holds_finished(self.scheduler)

    # -- actions of clients and operators
    def add(self, request: Any) -> None:
        """Hand a request to the scheduler."""
        Probe.active = self.probe
        self.ledger.added(request)
        self.scheduler.add_request(request)

    def proceed(self, request: Any) -> None:
        """Hand the next input of a session to the scheduler, which has a request of the same id."""
        Probe.active = self.probe
        self.ledger.before_update()
        self.scheduler.add_request(request)
        self.ledger.state_changes("continue")

    def abort(self, req_id: str) -> None:
        """Abort a request, as a client that goes away does."""
        Probe.active = self.probe
        self.ledger.before_update()
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        self.ledger.state_changes("abort")

    def preempt(self, req_id: str) -> bool:
        """Preempt a running request; the next step admits no waiting one, as in vLLM.

        Returns False if it does not run, or if the engine would not preempt it now (R160).
        """
        request = self.scheduler.requests.get(req_id)
        if request is None or request.status != RequestStatus.RUNNING:
            return False
        Probe.active = self.probe
        self.ledger.before_update()
        done = vllm_api.force_preemption(self.scheduler, request)
        self.preempted = self.preempted or done
        self.ledger.state_changes("preempt")
        return done

    def reset(self, *, running: bool, connector: bool) -> bool:
        """Call reset_prefix_cache and return what the scheduler returned.

        The engine refuses while blocks are held for a transfer (R172): that is False too.
        """
        Probe.active = self.probe
        self.ledger.before_update()
        asked = {"running": running, "connector": connector}
        self.trace.emit("cache.reset", phase="asked", returned=None, **asked)
        done = False
        try:
            done = vllm_api.reset_caches(self.scheduler, **asked)
            self.trace.emit("cache.reset", phase="done", returned=done, **asked)
        except RuntimeError as error:
            if self.probe.last_error is not None and self.probe.last_error[1] is error:
                raise
        self.ledger.state_changes("reset")
        return done

    def pause(self, paused: bool) -> None:
        """Stop or resume the admission of new requests."""
        vllm_api.set_paused(self.scheduler, paused)

    # -- steps
    def schedule(self) -> None:
        """Schedule one step; it joins the queue. Workers that are not late execute it now.

        The oldest step lands first if the queue is full: the engine core has no more in flight.
        """
        if self.is_full:
            self.land()
        self.trace.step += 1
        Probe.active = self.probe
        self.ledger.before_schedule()
        admission = vllm_api.no_admission(self.scheduler) if self.preempted else nullcontext()
        self.preempted = False
        with admission, counted(self.trace, self.scheduler):
            output = self.scheduler.schedule()
        self.ledger.after_schedule(output, self.view.tables())
        fresh = self.ledger.take_fresh(self.view.tables())
        digest = self.executor.plan(output)
        flight = Flight(output, self.trace.step, fresh, self.ledger.launch(), digest)
        if not self.late:
            self._execute(flight)
        self.queue.append(flight)

    def _execute(self, flight: Flight) -> None:
        """Have the workers execute a step; what they do counts as a part of that step."""
        Probe.active = self.probe
        if self.late and self.variant.scheduling == "async":
            self.trace.emit("worker.late", of_step=flight.step, req=list(flight.launched))
        newest, self.trace.step = self.trace.step, flight.step
        flight.result = self.executor.execute(flight)
        flight.corrupt = self.worker.corrupt
        self.trace.step = newest

    def land(self) -> None:
        """Process the oldest queued output, which late workers have yet to compute."""
        if self.queue[0].result is None:
            self._execute(self.queue[0])
        flight = self.queue.popleft()
        if not self.queue:  # the newest: it has sampled its tokens
            device.current.finish()
        Probe.active = self.probe
        self.ledger.before_update()
        drafts = self._drafts(flight.output)
        self.statistics.landing(flight.result.kv_connector_output)
        with self.ledger.publishing(flight.output):
            self.scheduler.update_from_output(flight.output, flight.result)
        if drafts is not None:
            self.scheduler.update_draft_token_ids(drafts)
        if self.relay is not None:
            self.relay.landed(flight.step)
        pooled = flight.result.pooler_output
        vectors = dict(zip(flight.result.req_ids, pooled, strict=True)) if pooled else None
        self.ledger.after_update(flight.output, flight.step, flight.corrupt, vectors)
        if self.variant.engine == "reference":
            self.scheduler.check_integrity()

    def _drafts(self, output: Any) -> DraftTokenIds | None:
        """Return the drafts that a synchronous step proposes; asynchronous ones are scheduled."""
        count = self.variant.case.config.spec_tokens
        if not count or self.variant.scheduling != "sync" or not output.num_scheduled_tokens:
            return None
        ids = list(output.num_scheduled_tokens)
        return DraftTokenIds(ids, [[DRAFT_TOKEN] * count for _ in ids])

    def iterate(self) -> None:
        """Do one iteration of the engine core: fill the queue, or land the oldest step.

        Steps that the case scheduled and did not land fill the queue, too.
        """
        if self._has_requests() and not self.is_full:
            self.schedule()
            scheduled = self.queue[-1].output.total_num_scheduled_tokens > 0
            if not self.is_full and (scheduled or self._has_requests()):
                return
        if self.queue:
            self.land()

    @property
    def is_full(self) -> bool:
        """Whether as many steps are in flight as the engine core has at most; synchronous: one."""
        return len(self.queue) >= self.depth

    def shutdown(self, again: bool = False) -> None:
        """Shut both connector halves down, the worker's first; once, unless `again`."""
        if self.ranks.leader.half is None or (self.is_down and not again):
            return
        self.is_down = True
        Probe.active = self.probe
        if not again and (used := device.current.used()):
            self.trace.emit("device.used", **used)
        op = "shutdown_again" if again else "shutdown"
        with noted(self.trace, op, type(self.connector)):
            for rank in self.ranks.members:
                with self.ranks.driving(rank):
                    rank.half.shutdown()
            self.connector.shutdown()
        device.current.catch_up()  # threads that are about to end
