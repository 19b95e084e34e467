# SPDX-License-Identifier: Apache-2.0
"""Reads one scheduler's state before and after each call, and emits what changed.

The events cover steps, scheduled requests, states, blocks, releases and statistics. `RankReports`
joins the reports of several ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

from kvconform.compat.step import ended_transfers, has_sync_loads
from kvconform.compat.vllm_api import FINISHED_ERROR, RequestStatus, is_chunk
from kvconform.contract.events import NO_OWNER
from kvconform.contract.trace import Event, Trace
from kvconform.kv.cache import Group
from kvconform.kv.provenance import HandedOut
from kvconform.observe.observer import Observer
from kvconform.observe.probe import Probe
from kvconform.observe.view import SchedulerView, references


class RankReports:
    """Joins the reports of one engine's ranks step by step.

    `count`: what the connector's get_finished_count returned; None: one report from each rank.
    `aggregator`: the engine's own, if it has one already. `siblings`: whether there are connectors
    besides, whose holds are not recorded.
    """

    def __init__(
        self,
        trace: Trace,
        connector: Any,
        ranks: int,
        count: int | None,
        aggregator: Any = None,
        *,
        siblings: bool = False,
    ) -> None:
        self._trace = trace
        self._siblings = siblings
        self._expected = count or ranks
        self._aggregator = aggregator or KVOutputAggregator.from_connector(connector, ranks)
        # Reports still to come, by direction and request id.
        self._left: dict[tuple[str, str], int] = {}
        # Transfers that all reports have come for; the number of events at that time.
        self._over: dict[tuple[str, str], int] = {}
        self._surplus: set[tuple[str, str]] = set()
        self._failing: set[str] = set()

    def join(self, results: list[Any], rank: int = -1) -> Any:
        """Return the result of a rank (the last one's by default) with the reports of all ranks.

        Changes that result. Emits ranks.joined if there was anything to join.
        """
        reports = [getattr(result, "kv_connector_output", None) for result in results]
        due, failures, errors = self._due(reports)
        result = self._aggregator.aggregate(results, range(len(results))[rank])
        joined = getattr(result, "kv_connector_output", None)
        found = ended_transfers(joined)
        failed = set(getattr(joined, "failed_recving", None) or ())
        invalid = set(getattr(joined, "invalid_block_ids", None) or ())
        surplus, self._surplus = self._surplus, set()
        if found or due or failed or failures or invalid or errors or surplus:
            self._trace.emit(
                "ranks.joined",
                expected=self._expected,
                sent=_ids(found, "send"),
                received=_ids(found, "recv"),
                failed=sorted(failed),
                invalid=sorted(invalid),
                all_sent=_ids(due, "send"),
                all_received=_ids(due, "recv"),
                errors=sorted(errors),
                failures=sorted(failures),
                early=_names(found - due),
                late=_names(due - found),
                surplus=_names(surplus),
            )
        return result

    def _due(self, reports: list[Any]) -> tuple[set[tuple[str, str]], set[str], set[int]]:
        """Return what joining these reports must give.

        That is the transfers (direction, request id) that are finished now, the requests of the
        failed loads among them, and the blocks with errors.
        """
        due: set[tuple[str, str]] = set()
        errors: set[int] = set()
        for report in filter(None, reports):
            self._expected = getattr(report, "expected_finished_count", 0) or self._expected
            for key in ended_transfers(report):
                left = self._left.pop(key, self._expected) - 1
                if self._expects_no_more(key):
                    self._surplus.add(key)
                if left:
                    self._left[key] = left
                else:
                    due.add(key)
                    self._over[key] = len(self._trace.events)
            errors |= set(report.invalid_block_ids or ())
            self._failing |= set(getattr(report, "failed_recving", None) or ())
        failures = {req for req in self._failing if ("recv", req) in due}
        self._failing -= failures
        return due, failures, errors

    def _expects_no_more(self, key: tuple[str, str]) -> bool:
        """Return whether all reports of a transfer have come, and the engine awaits none."""
        since = self._over.get(key)
        if since is None:
            return False
        way, req = key
        later = [e for e in self._trace.events[since:] if e.get("req") == req]
        if self._siblings and any(_may_be_a_siblings(e, way) for e in later):
            return False
        return not any(e["kind"] == "hold" and e["direction"] == way for e in later)


def _may_be_a_siblings(event: dict[str, Any], way: str) -> bool:
    """Return whether a sibling may send, or load, for a request from this event on.

    It may load if this connector was asked and is granted nothing: what it claimed may be another's
    turn.
    """
    if way == "send":
        return bool(event["kind"] == "req.finished")
    asked = event["kind"] == "alloc" and event["claimed"] is not None
    return bool(asked and not event["external"])


def _ids(transfers: set[tuple[str, str]], way: str) -> list[str]:
    return sorted(req for each, req in transfers if each == way)


def _names(transfers: set[tuple[str, str]]) -> list[str]:
    return [f"{way} {req}" for way, req in sorted(transfers)]


_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    FINISHED_ERROR: "error",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.PREEMPTED: "preempt",
    RequestStatus.WAITING_FOR_REMOTE_KVS: "load",
}


class Ledger:
    """Reads a scheduler's requests before and after each call.

    Emits events; wraps two methods of the engine's block pool, the scheduler's that preempts a
    request, and during an update one of its manager of KV cache blocks.
    """

    def __init__(
        self, trace: Trace, view: SchedulerView, observer: Observer, *, is_async: bool
    ) -> None:
        self.trace = trace
        self.view = view
        self.observer = observer
        self.is_async = is_async
        self.pool = view.scheduler.kv_cache_manager.block_pool
        self._groups = view.loads.shape.groups
        self._fresh: list[int] = []
        self._alive: list[tuple[str, weakref.ref[Any]]] = []
        self._states: dict[str, tuple[str, int]] = {}  # status and computed tokens before a call
        self._objects: dict[str, Any] = {}  # requests before update_from_output
        self._lengths: dict[str, int] = {}
        self._current: dict[str, Event] = {}  # req.scheduled of the step scheduled last
        self._flying: dict[str, list[Event]] = {}  # req.scheduled of steps that have not landed
        self._shown: dict[tuple[str, int], int] = {}  # table length that the outputs have shown
        self._writes: dict[int, set[int]] = {}  # id(output) -> blocks that the step writes
        self._is_scheduling = False
        self._wrap_pool()
        self._wrap_preemption()

    def _wrap_pool(self) -> None:
        get_new_blocks = self.pool.get_new_blocks
        free_blocks = self.pool.free_blocks

        def take(count: int) -> list[Any]:
            blocks = get_new_blocks(count)
            self._fresh.extend(block.block_id for block in blocks)
            return blocks  # type: ignore[no-any-return]

        def give(blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            listed = list(blocks)
            result = free_blocks(listed, *args, **kwargs)
            steps = self.view.in_flight()
            written = {block for step in steps for block in self._writes.get(step, ())}
            for block in listed:
                self.trace.emit(
                    "block",
                    op="free",
                    id=block.block_id,
                    owner=None,
                    ref=block.ref_cnt,
                    in_flight=block.block_id in written,
                )
            self._given_back(listed)
            return result

        self.pool.get_new_blocks = take
        self.pool.free_blocks = give

    def _wrap_preemption(self) -> None:
        scheduler = self.view.scheduler
        name = "_preempt_request" if hasattr(scheduler, "_preempt_request") else "preempt_now"
        preempt = getattr(scheduler, name, None)
        if preempt is None:  # until 0.11
            return

        @wraps(preempt)
        def displaced(request: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_scheduling:
                self.trace.emit(
                    "req.displaced",
                    req=request.request_id,
                    generation=self.view.generation(request.request_id),
                    computed=request.num_computed_tokens,
                    published=self._published_early(request),
                )
            return preempt(request, *args, **kwargs)

        setattr(scheduler, name, displaced)

    def _published_early(self, request: Any) -> list[int]:
        """Return the request's blocks in the prefix cache that are not computed to their end."""
        tables = self.view.tables().get(request.request_id, [])
        return [
            block
            for group, table in zip(self._groups, tables, strict=False)
            if not group.recurrent
            for index, block in enumerate(table)
            if block and (index + 1) * group.block_size > request.num_computed_tokens
            if self.pool.blocks[block].block_hash is not None
        ]

    def _given_back(self, blocks: Iterable[Any]) -> None:
        """Emit which references are left when the connector frees blocks, that is in a hook of it.

        How it took its own does not matter. Those that the engine keeps for steps in flight do not
        count as the engine's.
        """
        if Probe.active is None or not Probe.active.depth:
            return
        owed = references(self.view.tables())
        for block in blocks:
            held = block.ref_cnt - owed[block.block_id]
            self.trace.emit("block.freed", id=block.block_id, refs=block.ref_cnt, held=held)

    def take_fresh(self, tables: dict[str, list[list[int]]]) -> list[HandedOut]:
        """Return the blocks that the last schedule() handed out.

        `tables`: per request, one per group. Notes the group of each block; emits `block`.
        """
        places = {
            block: (req, number, index)
            for req, groups in tables.items()
            for number, table in enumerate(groups)
            for index, block in enumerate(table)
        }
        fresh = []
        groups_of_ranks = [
            each.shape.group_of for each in (self.view.loads, *self.view.other_loads)
        ]
        for block in filter(None, self._fresh):
            owner, number, index = places.get(block, (NO_OWNER, 0, None))
            positions = None
            if index is not None and not self._groups[number].recurrent:
                size = self._groups[number].block_size
                positions = range(index * size, (index + 1) * size)
            fresh.append(HandedOut(block, owner, positions))
            for group_of in groups_of_ranks:
                group_of[block] = number
            self.trace.emit("block", op="alloc", id=block, owner=owner, ref=1, in_flight=False)
        self._fresh = []
        return fresh

    # -- requests
    def added(self, request: Any) -> None:
        """Note a request that is about to be added."""
        self._alive.append((request.request_id, weakref.ref(request)))
        self._states[request.request_id] = (request.status.name, 0)

    def _snapshot(self) -> dict[str, tuple[str, int]]:
        requests = self.view.scheduler.requests
        return {req: (each.status.name, each.num_computed_tokens) for req, each in requests.items()}

    def before_schedule(self) -> None:
        """Note the requests before schedule()."""
        self._states = self._snapshot()
        self._is_scheduling = True

    def before_update(self) -> None:
        """Note the requests before anything that changes them outside of schedule()."""
        self._states = self._snapshot()
        self._objects = dict(self.view.scheduler.requests)
        self._lengths = {req: each.num_tokens for req, each in self._objects.items()}

    def state_changes(self, reason: str) -> None:
        """Emit req.state for each request whose status changed, or whose progress fell."""
        for req, (status, computed) in self._states.items():
            request = self.view.scheduler.requests.get(req) or self._objects.get(req)
            if request is None:
                continue
            now = request.status.name
            if now == status and request.num_computed_tokens >= computed:
                continue
            if request.status != RequestStatus.RUNNING:
                # The KV that its steps in flight write belongs to no request any more.
                for event in self._flying.pop(req, ()):
                    self.trace.amend(event, final_after=None)
            why = _REASONS.get(request.status, reason) if now != status else "rollback"
            if status == RequestStatus.WAITING_FOR_REMOTE_KVS.name and not request.is_finished():
                why = "load"  # the load ended; a preempted request waits as PREEMPTED (R124)
            self.trace.emit(
                "req.state",
                req=req,
                generation=self.view.generation(req),
                **{"from": status, "to": now},
                reason=why,
                by=reason,
                **_counters(request),
                in_flight=request.num_in_flight_tokens,
            )
        self._objects = {}  # a reference from here would make a request look leaked

    def _resumes(self, request: Any) -> bool:
        """Return whether a request that is admitted was preempted in this turn of its session.

        It may have loaded in between, and not have waited as PREEMPTED then.
        """
        before, _ = self._states.get(request.request_id, ("", 0))
        waits = (RequestStatus.PREEMPTED.name, RequestStatus.WAITING_FOR_REMOTE_KVS.name)
        return request.num_preemptions > 0 and before in waits

    # -- after schedule
    def after_schedule(self, output: Any, tables: dict[str, list[list[int]]]) -> None:
        """Emit step.scheduled, req.scheduled and req.state of one schedule().

        `tables`: per request, one per group.
        """
        self._is_scheduling = False
        cached = output.scheduled_cached_reqs
        resumed = set(getattr(cached, "resumed_req_ids", ()) or ())
        self.state_changes("admit")
        self.trace.emit(
            "step.scheduled",
            total=output.total_num_scheduled_tokens,
            new=[new.req_id for new in output.scheduled_new_reqs],
            cached=list(cached.req_ids),
            resumed=sorted(resumed),
            preempted=sorted(output.preempted_req_ids or ()),
            finished=sorted(output.finished_req_ids),
            has_sync_loads=has_sync_loads(output),
            empty=output.total_num_scheduled_tokens == 0,
            new_ids=sum(map(len, getattr(cached, "new_token_ids", ()))),
        )
        self._current = {}
        flying = self.view.in_flight()
        self._writes = {step: blocks for step, blocks in self._writes.items() if step in flying}
        self._writes[id(output)] = set()
        requests = self.view.scheduler.requests
        for new in output.scheduled_new_reqs:
            request = requests[new.req_id]
            prefill = getattr(new, "prefill_token_ids", None)
            self._scheduled(
                request,
                output,
                tables,
                listed_as="resumed_as_new" if self._resumes(request) else "new",
                output_computed=new.num_computed_tokens,
                new_blocks=list(new.block_ids[0]),
                all_ids=None,
                prefill_ids=None if prefill is None else len(prefill),
            )
        for index, req in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            ids = cached.all_token_ids.get(req)
            self._scheduled(
                requests[req],
                output,
                tables,
                listed_as="resumed" if req in resumed else "cached",
                output_computed=cached.num_computed_tokens[index],
                new_blocks=None if blocks is None else list(blocks[0]),
                all_ids=None if ids is None else len(ids),
                prefill_ids=None,
            )

    def _scheduled(
        self,
        request: Any,
        output: Any,
        tables: dict[str, list[list[int]]],
        *,
        listed_as: str,
        **of_output: Any,
    ) -> None:
        """Emit req.scheduled; `of_output` are its fields that come from the SchedulerOutput."""
        req = request.request_id
        count = output.num_scheduled_tokens[req]
        drafts = len(output.scheduled_spec_decode_tokens.get(req, ()))
        key = (req, self.view.generation(req))
        # schedule() has advanced the counters: the hook saw the computed tokens without this
        # step's, and the placeholders without those that it will sample.
        computed = request.num_computed_tokens - count
        placeholders = request.num_output_placeholders
        if self.is_async and not is_chunk(request):
            placeholders -= getattr(self.view.scheduler, "num_sampled_tokens_per_step", 1) + drafts
        table = tables.get(req, [[]])[0]
        self._current[req] = self.trace.emit(
            "req.scheduled",
            req=req,
            generation=key[1],
            listed_as=listed_as,
            computed=computed,
            scheduled=count,
            placeholders=placeholders,
            known=request.num_tokens,
            in_flight=request.num_in_flight_tokens - count,
            drafts=drafts,
            table=table,
            final_before=None,
            final_after=None,
            prefill=computed - placeholders < request.num_tokens - 1,
            told=self._shown.get(key, 0) if listed_as == "cached" else 0,
            unfilled=None,
            **of_output,
        )
        self._shown[key] = len(table)
        written = self._writes[id(output)]
        for group, blocks in zip(self._groups, tables.get(req, ()), strict=False):
            size = group.block_size
            written.update(blocks[computed // size : -(-(computed + count) // size)])

    # -- execution
    def launch(self) -> dict[str, Event]:
        """Return the req.scheduled events of the step that was scheduled last, by request id.

        The step is in flight from now on.
        """
        for req, event in self._current.items():
            self._flying.setdefault(req, []).append(event)
        return self._current

    def executed(self, event: Event, *, final_before: int, final_after: int | None) -> None:
        """Fill in how far a request's KV was final before the step, and is after it, in tokens.

        `final_after` is None where its load failed. Nothing is filled in for a request that the
        engine took off the step in the meantime.
        """
        if any(event is flying for flying in self._flying.get(event["req"], ())):
            self.trace.amend(event, final_before=final_before, final_after=final_after)

    # -- after update
    @contextmanager
    def publishing(self, output: Any) -> Iterator[None]:
        """Watch what an update_from_output(), the body, publishes for the requests of the step.

        Emits block.published if a request did not run before.
        """
        manager = self.view.scheduler.kv_cache_manager
        requests = self.view.scheduler.requests
        before = {
            req: requests[req].status for req in output.num_scheduled_tokens if req in requests
        }
        publish = manager.cache_blocks

        def noted(request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            req = request.request_id
            status = before.get(req, RequestStatus.RUNNING)
            if status != RequestStatus.RUNNING and num_tokens >= self._groups[0].block_size:
                self.trace.emit(
                    "block.published",
                    req=req,
                    generation=self.view.generation(req),
                    status=status.name,
                    tokens=num_tokens,
                )
            return publish(request, num_tokens, *args, **kwargs)

        manager.cache_blocks = noted
        try:
            yield
        finally:
            del manager.cache_blocks

    def after_update(
        self, output: Any, step: int, corrupt: set[str], vectors: dict[str, Any] | None = None
    ) -> None:
        """Emit sample, req.updated, req.state and releases of one update_from_output().

        `corrupt`: requests that read wrong KV in that step. `vectors`: what a pooling model
        returned for requests.
        """
        scheduler = self.view.scheduler
        for req in output.num_scheduled_tokens:
            vector = vectors[req] if vectors else None
            self._samples(req, vector, clean=req not in corrupt)
            request = scheduler.requests.get(req)
            self._flying[req] = self._flying.get(req, [])[1:]
            if request is None:
                continue
            blocks = scheduler.kv_cache_manager.get_block_ids(req)[0]
            cached = sum(_is_whole(self.pool.blocks[block], self._groups[0]) for block in blocks)
            self.trace.emit(
                "req.updated",
                req=req,
                generation=self.view.generation(req),
                of_step=step,
                cached_blocks=cached,
                real=request.num_computed_tokens - request.num_output_placeholders,
                status=request.status.name,
                **_counters(request),
            )
        self.state_changes("output")
        self._releases()

    def _samples(self, req: str, vector: Any, *, clean: bool) -> None:
        """Emit the tokens that the engine accepted, or the vector that ended a request.

        Those of a step that failed, or that a preemption overtook, are not among them.
        """
        request = self._objects.get(req)
        if request is None:
            return
        first = self._lengths[req] - request.num_prompt_tokens
        tokens = request.all_token_ids[self._lengths[req] :]
        if vector is not None and request.status == RequestStatus.FINISHED_STOPPED:
            first, tokens = 0, [int(vector[0])]
        for index, token in enumerate(tokens, first):
            self.trace.emit(
                "sample",
                req=req,
                generation=self.view.generation(req),
                index=index,
                token=token,
                clean=clean,
                prompt=request.num_prompt_tokens,
            )

    def _releases(self) -> None:
        """Note the transfers that the engine no longer waits for."""
        scheduler = self.view.scheduler
        for req, directions in list(self.observer.held.items()):
            request = scheduler.requests.get(req)
            reported = req in scheduler.finished_recving_kv_req_ids
            for direction in sorted(directions):
                if reported or not _waits(request, direction):
                    ended = request is None or request.is_finished()
                    cause = "reported after its end" if ended else "reported"
                    self.observer.release(req, direction, cause)

    def leaked(self) -> list[str]:
        """Return the ids of Request objects that are alive although the engine has dropped them.

        A single object does not count if it was looked up, admitted or finished last: a connector
        that keeps the latest request replaces it by the next one.
        """
        requests = self.view.scheduler.requests
        found = sorted(
            req
            for req, ref in self._alive
            if (live := ref()) is not None and requests.get(req) is not live
        )
        last = {
            (e["kind"], e.get("on")): e["req"]
            for e in self.trace.events
            if e["kind"] in ("lookup", "alloc", "req.finished")
        }
        only_the_latest = len(found) == 1 and found[0] in last.values()
        return [] if only_the_latest else found


def _is_whole(block: Any, group: Group) -> bool:
    """Return whether the pool has a hash of the whole block, and not only of its beginning."""
    if block.block_hash is None:
        return False
    return (getattr(block, "block_hash_num_tokens", None) or 0) % group.block_size == 0


def _counters(request: Any) -> dict[str, int]:
    """Return the counters of a request, as fields of an event."""
    return {
        "computed": request.num_computed_tokens,
        "placeholders": request.num_output_placeholders,
        "known": request.num_tokens,
    }


def _waits(request: Any, direction: str) -> bool:
    """Return whether the engine keeps a request for a transfer in this direction."""
    if request is None:
        return False
    if direction == "send":
        return True
    return request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.is_finished()


@contextmanager
def counted(trace: Trace, scheduler: Any) -> Iterator[None]:
    """Compare the statistics of one schedule(), the body, with the lookups in the trace.

    Emits `queries` if the scheduler counted lookups, or admitted a request that was looked up. Does
    nothing if the scheduler keeps no statistics. Changes nothing but the trace.
    """
    stats = getattr(scheduler, "connector_prefix_cache_stats", None)
    if stats is None:
        yield
        return
    before = _counts(stats)
    first = len(trace.events)
    yield
    requests, tokens, hits = (now - then for now, then in zip(_counts(stats), before, strict=True))
    events = trace.events[first:]
    # A session that goes on is admitted, too, with what it has computed, and not looked up.
    looked_up = {event["req"] for event in events if event["kind"] == "lookup"}
    admitted = [
        event
        for event in events
        if event["kind"] == "alloc" and not event["second_call"] and event["req"] in looked_up
    ]
    reading = [
        event
        for event in admitted
        if not scheduler.requests[event["req"]].skip_reading_prefix_cache
    ]
    if admitted or requests:
        due_tokens = sum(
            scheduler.requests[event["req"]].num_tokens - event["local"] for event in reading
        )
        trace.emit(
            "queries",
            requests=requests,
            tokens=tokens,
            hits=hits,
            due_requests=len(reading),
            due_tokens=due_tokens,
            due_hits=sum(event["external"] for event in reading),
            skipping=[event["req"] for event in admitted if event not in reading],
        )


def _counts(stats: Any) -> tuple[int, int, int]:
    """Return (requests, tokens, tokens found) so far.

    The sums include previously preempted requests, which vLLM counts separately.
    """
    return (
        stats.requests + stats.preempted_requests,
        stats.queries + stats.preempted_queries,
        stats.hits + stats.preempted_hits,
    )
