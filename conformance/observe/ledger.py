# SPDX-License-Identifier: Apache-2.0
"""The reports of several ranks as one: vLLM's own aggregator joins them, and what comes out is set against what went in.

Keeps book of one scheduler between its calls and emits what changed: steps, scheduled requests, states, blocks, releases.

The engine's own statistics of the external cache, step by step, beside what they have to say.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

from kvconform.compat.step import has_sync_loads
from kvconform.compat.vllm_api import FINISHED_ERROR, RequestStatus, is_chunk
from kvconform.contract.trace import Event, Trace
from kvconform.observe.observer import Observer


class Joined:
    """Joins one engine's reports step by step. `count`: what the connector's get_finished_count said, None for one of each rank.
    `aggregator` is the engine's own, where it has one already."""

    def __init__(
        self, trace: Trace, connector: Any, ranks: int, count: int | None, aggregator: Any = None
    ) -> None:
        self._trace, self._expected = trace, count or ranks
        self._aggregator = aggregator or KVOutputAggregator.from_connector(connector, ranks)
        self._left: dict[
            tuple[str, str], int
        ] = {}  # direction, request id -> reports that have not come yet
        self._failing: set[str] = set()

    def join(self, results: list[Any], rank: int = -1) -> Any:
        """A rank's result (the last one's), with the reports of all in it. Changes it; emits ranks.joined if there was anything to join."""
        due, failures, errors = self._due(
            [getattr(result, "kv_connector_output", None) for result in results]
        )
        result = self._aggregator.aggregate(results, range(len(results))[rank])
        joined = getattr(result, "kv_connector_output", None)
        ids = {way: set(getattr(joined, name, None) or ()) for way, name in _FIELDS.items()}
        found = {(way, req) for way in _FIELDS for req in ids[way]}
        failed, invalid = (
            set(getattr(joined, "failed_recving", None) or ()),
            set(getattr(joined, "invalid_block_ids", None) or ()),
        )
        if found or due or failed or failures or invalid or errors:
            self._trace.emit(
                "ranks.joined",
                expected=self._expected,
                sent=sorted(ids["send"]),
                received=sorted(ids["recv"]),
                failed=sorted(failed),
                invalid=sorted(invalid),
                all_sent=_ids(due, "send"),
                all_received=_ids(due, "recv"),
                errors=sorted(errors),
                failures=sorted(failures),
                early=_names(found - due),
                late=_names(due - found),
            )
        return result

    def _due(self, reports: list[Any]) -> tuple[set[tuple[str, str]], set[str], set[int]]:
        """What must come of these reports: transfers that are finished now, failed loads among them, blocks with errors."""
        due: set[tuple[str, str]] = set()
        errors: set[int] = set()
        for report in filter(None, reports):
            self._expected = getattr(report, "expected_finished_count", 0) or self._expected
            for way, name in _FIELDS.items():
                for req in getattr(report, name) or ():
                    left = self._left.pop((way, req), self._expected) - 1
                    if left:
                        self._left[way, req] = left
                    else:
                        due.add((way, req))
            errors |= set(report.invalid_block_ids or ())
            self._failing |= set(getattr(report, "failed_recving", None) or ())
        failures = {req for req in self._failing if ("recv", req) in due}
        self._failing -= failures
        return due, failures, errors


_FIELDS = {"send": "finished_sending", "recv": "finished_recving"}


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
    """Reads a scheduler's requests before and after each call. Emits events; changes nothing in the engine but the pool's wrappers."""

    def __init__(
        self,
        trace: Trace,
        scheduler: Any,
        pool: Any,
        observer: Observer,
        sizes: Sequence[int],
        *,
        is_async: bool,
    ) -> None:
        self.trace, self.scheduler, self.pool, self.observer, self.sizes = (
            trace,
            scheduler,
            pool,
            observer,
            sizes,
        )
        self.is_async = is_async
        self.fresh: list[int] = []
        self.alive: list[tuple[str, weakref.ref[Any]]] = []
        self.finals: dict[str, Any] = {}
        self._states: dict[str, tuple[str, int]] = {}
        self._current: dict[str, Event] = {}
        self._flying: dict[str, list[Event]] = {}
        self._told: dict[
            tuple[str, int], int
        ] = {}  # blocks of a request that the outputs have told of
        self._writes: dict[int, set[int]] = {}  # id(output) -> blocks that the step writes
        self.in_flight: Callable[[], list[int]] = (
            list  # id(output) of the steps that have not landed
        )
        self._wrap_pool()

    def _wrap_pool(self) -> None:
        get_new_blocks, free_blocks = self.pool.get_new_blocks, self.pool.free_blocks
        groups = self.observer.oracle.cache.group_of

        def take(count: int) -> list[Any]:
            blocks = get_new_blocks(count)
            self.fresh.extend(block.block_id for block in blocks)
            return blocks  # type: ignore[no-any-return]

        def give(blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            listed = list(blocks)
            result = free_blocks(listed, *args, **kwargs)
            written = {
                block for output in self.in_flight() for block in self._writes.get(output, ())
            }
            for block in listed:
                self.trace.emit(
                    "block",
                    op="free",
                    id=block.block_id,
                    group=int(groups[block.block_id]),
                    owner=None,
                    ref=block.ref_cnt,
                    in_flight=block.block_id in written,
                )
            return result

        self.pool.get_new_blocks, self.pool.free_blocks = take, give

    def take_fresh(self, tables: dict[str, list[list[int]]]) -> list[tuple[int, str]]:
        """Blocks that the last schedule handed out, with their owners. `tables`: per request, one per group. Notes whose group they are."""
        owners = {
            block: (req, number)
            for req, groups in tables.items()
            for number, table in enumerate(groups)
            for block in table
        }
        fresh = [(block, owners.get(block, ("nobody", 0))) for block in self.fresh if block != 0]
        for block, (owner, group) in fresh:
            self.observer.oracle.cache.group_of[block] = group
            self.trace.emit(
                "block",
                op="alloc",
                id=block,
                group=group,
                owner=owner,
                ref=1,
                in_flight=False,
            )
        self.fresh = []
        return [(block, owner) for block, (owner, _) in fresh]

    # -- requests --------------------------------------------------------------------------------------------------------------
    def added(self, request: Any) -> None:
        """A request is about to be added."""
        self.alive.append((request.request_id, weakref.ref(request)))
        self._states[request.request_id] = (request.status.name, 0)

    def _snapshot(self) -> dict[str, tuple[str, int]]:
        return {
            r: (q.status.name, q.num_computed_tokens) for r, q in self.scheduler.requests.items()
        }

    def before_schedule(self) -> None:
        """Before schedule()."""
        self._states = self._snapshot()

    def before_update(self) -> None:
        """Before anything that changes requests outside schedule()."""
        self._states = self._snapshot()
        self._objects = dict(self.scheduler.requests)
        self._lengths = {r: q.num_tokens for r, q in self._objects.items()}

    _objects: dict[str, Any] = {}
    _lengths: dict[str, int] = {}

    def state_changes(self, reason: str) -> None:
        """Emit req.state for every request whose status changed, or whose progress fell, since the snapshot."""
        for req, (status, computed) in self._states.items():
            request = self.scheduler.requests.get(req) or self._objects.get(req)
            if request is None:
                continue
            now = request.status.name
            fell = request.num_computed_tokens < computed
            if now == status and not fell:
                continue
            if request.status != RequestStatus.RUNNING:
                for event in self._flying.pop(
                    req, ()
                ):  # what those steps wrote is nobody's any more
                    self.trace.amend(event, final_after=None)
            why = _REASONS.get(request.status, reason) if now != status else "rollback"
            if status == RequestStatus.WAITING_FOR_REMOTE_KVS.name and not request.is_finished():
                why = "load"  # it ended: the request waits to be admitted, as preempted if it was (R124)
            self.trace.emit(
                "req.state",
                req=req,
                generation=self.observer.generation(req),
                **{"from": status, "to": now},
                reason=why,
                by=reason,
                computed=request.num_computed_tokens,
                placeholders=request.num_output_placeholders,
                known=request.num_tokens,
                in_flight=request.num_in_flight_tokens,
            )
        self._objects = {}  # whoever holds a request here makes it look leaked

    # -- after schedule --------------------------------------------------------------------------------------------------------
    def after_schedule(self, output: Any, tables: dict[str, list[list[int]]]) -> None:
        """Emit step.scheduled, req.scheduled and req.state of one schedule(). `tables`: per request, one per group."""
        cached = output.scheduled_cached_reqs
        resumed = set(getattr(cached, "resumed_req_ids", ()) or ())
        drafts = {r: len(d) for r, d in output.scheduled_spec_decode_tokens.items()}
        self.state_changes("admit")
        self.trace.emit(
            "step.scheduled",
            total=output.total_num_scheduled_tokens,
            new=[n.req_id for n in output.scheduled_new_reqs],
            cached=list(cached.req_ids),
            resumed=sorted(resumed),
            preempted=sorted(output.preempted_req_ids or ()),
            finished=sorted(output.finished_req_ids),
            has_sync_loads=has_sync_loads(output),
            empty=output.total_num_scheduled_tokens == 0,
            drafts=drafts,
            new_ids=sum(map(len, getattr(cached, "new_token_ids", ()))),
        )
        self._current, flying = {}, self.in_flight()
        self._writes = {step: blocks for step, blocks in self._writes.items() if step in flying} | {
            id(output): set()
        }
        self._writing = self._writes[id(output)]
        for new in output.scheduled_new_reqs:
            request = self.scheduler.requests[new.req_id]
            kind = "resumed_as_new" if request.num_preemptions else "new"
            prefill = getattr(new, "prefill_token_ids", None)
            self._scheduled(
                request,
                kind,
                new.num_computed_tokens,
                output,
                tables,
                new_blocks=list(new.block_ids[0]),
                outputs=0,
                all_ids=None,
                prefill_ids=None if prefill is None else len(prefill),
            )
        for index, req in enumerate(cached.req_ids):
            blocks, ids = cached.new_block_ids[index], cached.all_token_ids.get(req)
            self._scheduled(
                self.scheduler.requests[req],
                "resumed" if req in resumed else "cached",
                cached.num_computed_tokens[index],
                output,
                tables,
                new_blocks=None if blocks is None else list(blocks[0]),
                outputs=cached.num_output_tokens[index],
                all_ids=None if ids is None else len(ids),
                prefill_ids=None,
            )

    def _scheduled(
        self,
        request: Any,
        kind: str,
        so_c: int,
        output: Any,
        tables: dict[str, list[list[int]]],
        *,
        new_blocks: list[int] | None,
        outputs: int,
        all_ids: int | None,
        prefill_ids: int | None,
    ) -> None:
        req, count = request.request_id, output.num_scheduled_tokens[request.request_id]
        drafts = len(output.scheduled_spec_decode_tokens.get(req, ()))
        key = (req, self.observer.generation(req))
        # schedule() has advanced the counters; the hook saw them as they were before: C by this step's tokens, P by what it will sample.
        before, placeholders = request.num_computed_tokens - count, request.num_output_placeholders
        if self.is_async and not is_chunk(request):
            placeholders -= 1 + drafts
        self._current[req] = self.trace.emit(
            "req.scheduled",
            req=req,
            generation=key[1],
            listed_as=kind,
            output_computed=so_c,
            computed=before,
            scheduled=count,
            placeholders=placeholders,
            known=request.num_tokens,
            in_flight=request.num_in_flight_tokens - count,
            drafts=drafts,
            new_blocks=new_blocks,
            table=tables.get(req, [[]])[0],
            num_output_tokens=outputs,
            final_before=None,
            final_after=None,
            prefill=before - placeholders < request.num_tokens - 1,
            all_ids=all_ids,
            prefill_ids=prefill_ids,
            told=self._told.get(key, 0) if kind == "cached" else 0,
        )
        self._told[key] = len(tables.get(req, [[]])[0])
        for size, table in zip(self.sizes, tables.get(req, ()), strict=False):
            self._writing.update(table[before // size : -(-(before + count) // size)])

    _writing: set[int] = set()

    def after_execute(self, rows: Iterable[Any], failed: set[str]) -> None:
        """Fill in what the worker made of the step: final KV before and after it (None where the request's load failed)."""
        for row in rows:
            event = self._current.get(row.state.chain.req)
            if event is not None:
                self.trace.amend(
                    event,
                    final_before=min(row.before, row.start + row.count),
                    final_after=None if row.state.chain.req in failed else row.known,
                )
                self._flying.setdefault(row.state.chain.req, []).append(event)

    # -- after update ----------------------------------------------------------------------------------------------------------
    def after_update(self, output: Any, step: int, corrupt: set[str]) -> None:
        """Emit sample, req.updated, req.state and releases of one update_from_output(); `corrupt` read wrong KV in that step."""
        manager = self.scheduler.kv_cache_manager
        for req in output.num_scheduled_tokens:
            self._samples(req, clean=req not in corrupt)
            request = self.scheduler.requests.get(req)
            self._flying[req] = self._flying.get(req, [])[1:]
            if request is None:
                continue
            blocks = manager.get_block_ids(req)[0]
            cached = sum(self.pool.blocks[b].block_hash is not None for b in blocks)
            self.trace.emit(
                "req.updated",
                req=req,
                generation=self.observer.generation(req),
                of_step=step,
                computed=request.num_computed_tokens,
                placeholders=request.num_output_placeholders,
                known=request.num_tokens,
                in_flight=request.num_in_flight_tokens,
                cached_blocks=cached,
                real=request.num_computed_tokens - request.num_output_placeholders,
                status=request.status.name,
            )
        self.state_changes("output")
        self._releases()

    def _samples(self, req: str, *, clean: bool) -> None:
        """Emit the tokens that the engine accepted: not those of a step that failed or was overtaken by a preemption."""
        request = self._objects.get(req)
        if request is None:
            return
        for position in range(self._lengths[req], request.num_tokens):
            self.trace.emit(
                "sample",
                req=req,
                generation=self.observer.generation(req),
                index=position - request.num_prompt_tokens,
                token=request.all_token_ids[position],
                clean=clean,
                prompt=request.num_prompt_tokens,
            )

    def _releases(self) -> None:
        for req, directions in list(self.observer.held.items()):
            request = self.scheduler.requests.get(req)
            for direction in sorted(directions):
                waiting = (
                    direction == "recv"
                    and request is not None
                    and (
                        request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
                        or request.is_finished()
                    )
                )
                held = direction == "send" and request is not None
                recved = req in self.scheduler.finished_recving_kv_req_ids
                if recved or not (waiting or held):
                    self.observer.release(req, direction, "reported")

    def leaked(self) -> list[str]:
        """Ids of Request objects that are still alive although the engine has forgotten them.

        A single one that was looked up, admitted or finished last is none: the next one takes its place.
        """
        found = sorted(
            r
            for r, ref in self.alive
            if (live := ref()) is not None and self.scheduler.requests.get(r) is not live
        )
        last = {
            (e["kind"], e.get("on")): e["req"]
            for e in self.trace.events
            if e["kind"] in ("lookup", "alloc", "req.finished")
        }
        return [] if len(found) == 1 and found[0] in last.values() else found


@contextmanager
def counted(trace: Trace, scheduler: Any) -> Iterator[None]:
    """Around one schedule(): emit `queries` if it counted lookups, or admitted a request that was looked up. Nothing where the scheduler
    keeps no statistics. Changes nothing but the trace."""
    stats = getattr(scheduler, "connector_prefix_cache_stats", None)
    if stats is None:
        yield
        return
    before, first = _counts(stats), len(trace.events)
    yield
    requests, tokens, hits = (now - then for now, then in zip(_counts(stats), before, strict=True))
    admitted = [
        event
        for event in trace.events[first:]
        if event["kind"] == "alloc" and not event["second_call"]
    ]
    reading = [
        event
        for event in admitted
        if not scheduler.requests[event["req"]].skip_reading_prefix_cache
    ]
    if admitted or requests:
        trace.emit(
            "queries",
            requests=requests,
            tokens=tokens,
            hits=hits,
            due_requests=len(reading),
            due_tokens=sum(
                scheduler.requests[event["req"]].num_tokens - event["local"] for event in reading
            ),
            due_hits=sum(event["external"] for event in reading),
            skipping=[event["req"] for event in admitted if event not in reading],
        )


def _counts(stats: Any) -> tuple[int, int, int]:
    """(requests, tokens, tokens that were there) so far; what was preempted before is counted apart by vLLM, and is not here."""
    return (
        stats.requests + stats.preempted_requests,
        stats.queries + stats.preempted_queries,
        stats.hits + stats.preempted_hits,
    )
