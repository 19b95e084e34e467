# SPDX-License-Identifier: Apache-2.0
"""Records the actions of a scheduler and its connector: lookup, alloc, hold, release and so on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvconform.compat.local_hits import LocalHits
from kvconform.compat.step import ended_transfers
from kvconform.compat.vllm_api import RequestStatus
from kvconform.contract.events import ENGINE_FIELD
from kvconform.contract.trace import Event, Trace
from kvconform.kv.oracle import Grant, Loads
from kvconform.kv.provenance import ROOT, Memory, extend
from kvconform.observe.call import Call
from kvconform.observe.metadata import MetadataObserver
from kvconform.observe.probe import Probe
from kvconform.observe.view import SchedulerView, references

BY_SCHEDULER = -1
"""In place of a rank: the scheduler half has reported a transfer."""
Incarnation = tuple[str, int]
"""A request id, and how many earlier requests had the same id."""


@dataclass
class Lookup:
    """The latest lookup of one incarnation of a request."""

    tokens: Any
    local: int
    is_async: bool
    activity: int
    allocated: bool = False
    loading: bool = False


@dataclass(frozen=True)
class Prefix:
    """Numbers of tokens at a request's start that some engine of the run has computed.

    - `ever`: under the request's identity.
    - `since_reset`: the same, since the connector's cache was reset.
    - `any_identity`: under any identity.
    """

    ever: int
    since_reset: int
    any_identity: int


class Observer:
    """Watches one scheduler.

    Emits events, and updates the loads of `view` and the `memory` that it shares with the engine.
    """

    def __init__(
        self,
        trace: Trace,
        probe: Probe,
        memory: Memory,
        view: SchedulerView,
        private: tuple[str, ...] = (),
    ) -> None:
        self.trace = trace
        self.memory = memory
        self.view = view
        self.metadata = MetadataObserver(trace, private)
        self.on_lookup: Callable[[Any, Event], None] | None = None
        self.activity = 0
        """Counts the events that may shrink the store: forward passes, failed loads, resets."""
        self.shares_store = False
        """Whether other engines of the run have the same store, and may reset it."""
        self.outage = False
        """Whether content of the store may be lost at any time without notice."""
        self.received: list[str] = []
        """Requests whose asynchronous load was reported as finished in the latest report."""
        self.held: dict[str, set[str]] = {}
        """Directions of the transfers that the engine waits for, by request id."""
        self._lookups: dict[Incarnation, Lookup] = {}
        # Transfers that failed, on one rank or on several, by incarnation and tokens.
        self._failed_claims: dict[tuple[str, int, int], set[str]] = {}
        self.sees_arrivals = False
        """Whether `arrived` is called; without it, failures are not counted across requests."""
        self.computed_meanwhile: set[str] = set()
        """Requests whose prompts another engine still computed when they were added."""
        self._unused: dict[Incarnation, int] = {}  # tokens of loads that the engine has not used
        self._failed_loads: set[Incarnation] = set()  # on any rank, since the blocks were granted
        self._transfers = 0
        self._reported: dict[str, set[str]] = {}  # directions, since the engine began to wait
        self._both: set[str] = set()  # load and send awaited at once, or when one was reported
        self._tails: set[Incarnation] = set()  # kept by register_finished_partial_tail
        self.reset_after = -1
        """The last step that was scheduled before the last reset of the connector's cache."""
        self._losses = 0  # failed loads, and resets of the connector's cache
        self._admissions: Counter[Incarnation] = Counter()
        self.local_hits: LocalHits | None = None
        """What vLLM took from its own cache; None: what connectors were asked behind."""
        memory.restarted()  # if the engine replaces another one
        self._listen(probe)

    def _listen(self, probe: Probe) -> None:
        probe.on("get_num_new_matched_tokens", after=self._lookup)
        probe.on("update_state_after_alloc", after=self._alloc)
        probe.on("get_external_cache_hit_sources", after=self._sources)
        probe.on("register_finished_partial_tail", after=self._tail)
        probe.on("request_finished", after=self._finished)
        probe.on("request_finished_all_groups", after=self._finished)
        self.metadata.watch_scheduler(probe)
        probe.on("get_transfer_results", after=self._results)
        probe.on("get_block_ids_with_load_errors", after=self._errors)
        self.metadata.watch_worker(probe)
        probe.on("update_connector_output", before=self._reports_come, after=self._reports_go_on)
        probe.on("reset_cache", before=self._resetting, after=self._reset)
        for hook in ("get_num_new_matched_tokens", "update_state_after_alloc"):
            probe.on(hook, after=self._interrupted)
        probe.on("build_connector_meta", after=self._interrupted)

    @property
    def _loads(self) -> Loads:
        return self.view.loads

    def _incarnation(self, request: Any) -> Incarnation:
        return request.request_id, self.view.generation(request.request_id)

    # -- lookups
    def _prefix(self, request: Any) -> Prefix:
        identity = self.view.identity(request.request_id)
        if request.request_id in self.computed_meanwhile:
            return Prefix(*[request.num_prompt_tokens] * 3)
        chain = plain = ROOT
        ever = since_reset = any_identity = 0
        for position, token in enumerate(request.all_token_ids):
            chain = extend(chain, token, identity.extra(position))
            plain = extend(plain, token)
            if plain not in self.memory.plain:
                break
            any_identity += 1
            ever += ever == position and chain in self.memory.ever
            since_reset += since_reset == position and chain in self.memory.since_reset
        return Prefix(ever, since_reset, any_identity)

    def _lookup(self, call: Call) -> None:
        if call.error is not None:
            return
        request = call.arg(0, "request")
        local = call.arg(1, "num_computed_tokens")
        tokens, is_async, type_ok = _claim(call.result)
        key = self._incarnation(request)
        previous = self._lookups.get(key)
        prefix = self._prefix(request)
        end = local + tokens if isinstance(tokens, int) else 0
        event = self.trace.emit(
            "lookup",
            req=key[0],
            generation=key[1],
            local=local,
            tokens=tokens,
            is_async=is_async,
            type_ok=type_ok,
            known=request.num_tokens,
            repeat=previous is not None and not previous.allocated,
            prev_tokens=None if previous is None else previous.tokens,
            store_may_have_shrunk=self._may_have_shrunk(previous, local),
            same_claim_failed=self._failures(key, tokens),
            same_content_failed=self._failures_of_all(request, local, end),
            ever_computed=prefix.ever,
            ever_plain=prefix.any_identity,
            computed_before_reset=self._stale(prefix, local, end),
            after_reset=self.memory.was_reset,
            computed=request.num_computed_tokens,
            starved=is_async and end > local and self._starved(request, int(end)),
            unused=min(self._unused.get(key, 0), request.num_tokens - 1),
        )
        self._lookups[key] = Lookup(tokens, local, is_async, self.activity)
        if self.on_lookup:
            self.on_lookup(request, event)

    def _may_have_shrunk(self, previous: Lookup | None, local: int) -> bool:
        """Return whether a lookup may find less than the previous one of the same request.

        A thread may find what a case has damaged, and remove it, at any time.
        """
        if self.outage or self.trace.damaged or previous is None:
            return True
        return previous.activity != self.activity or previous.local != local

    def _failures(self, key: Incarnation, tokens: Any) -> int:
        """Return how many loads of `tokens` tokens have failed for this incarnation."""
        return len(self._failed_claims.get((*key, tokens if isinstance(tokens, int) else -1), ()))

    def _failures_of_all(self, request: Any, local: int, end: int) -> int:
        """Return how many loads of what is claimed have failed since it was computed or loaded."""
        if end <= local or not self.memory.failed:
            return 0
        return self.memory.failed.get(self._contents(request, end)[-1], 0)

    def _contents(self, request: Any, end: int) -> list[int]:
        """Return the content ids of a request's tokens before position `end`."""
        identity = self.view.identity(request.request_id)
        return list(identity.contents(request.all_token_ids[:end]))

    def _stale(self, prefix: Prefix, local: int, end: int) -> int:
        """Return how many of the claimed tokens were only computed before a reset of the cache."""
        if not self.memory.was_reset or end <= local:
            return 0
        return max(0, min(end, prefix.ever) - max(prefix.since_reset, local))

    def _starved(self, request: Any, end: int) -> bool:
        return starved(self.view.scheduler, request, end, self._loads.shape.block_size)

    def _interrupted(self, call: Call) -> None:
        """Emit the counters of the requests that a hook was about when it raised."""
        if call.error is None:
            return
        scheduled: Mapping[str, int] = {}
        if call.hook == "build_connector_meta":
            scheduled = call.arg(0, "scheduler_output").num_scheduled_tokens
            known = self.view.scheduler.requests
            requests = [known[name] for name in scheduled if name in known]
        else:
            requests = [call.arg(0, "request")]
        tables = self.view.tables()
        for request in requests:
            name = request.request_id
            self.trace.emit(
                "req.interrupted",
                req=name,
                generation=self.view.generation(name),
                hook=call.hook,
                computed=request.num_computed_tokens,
                scheduled=scheduled.get(name),
                placeholders=request.num_output_placeholders,
                known=request.num_tokens,
                table=tables.get(name, [[]])[0],
            )

    # -- grants
    def _alloc(self, call: Call) -> None:
        if call.error is not None:
            return
        request = call.arg(0, "request")
        tables = [list(table) for table in call.arg(1, "blocks").get_block_ids()]
        external = call.arg(2, "num_external_tokens")
        req, generation = self._incarnation(request)
        self._admissions[req, generation] += 1
        known = self._lookups.get((req, generation))
        # A session that got more input is admitted again, with what it had computed.
        continued = getattr(request, "resumable", False) and known is not None and not known.loading
        second_call = known is None or (known.allocated and not continued)
        self._unused.pop((req, generation), None)
        self._failed_loads.discard((req, generation))
        lookup = None if known is None or known.allocated else known
        local = request.num_computed_tokens if lookup is None else lookup.local
        if not external and self.local_hits is not None:
            local = self.local_hits.of(req, local)
        is_async = known is not None and known.is_async and external > 0
        transfer = None
        if external > 0:
            self._transfers += 1
            transfer = f"{req}#{generation}.{self._transfers}"
        if known is not None:
            known.allocated = True
            known.loading = is_async
        self.metadata.forget_offers(req)
        if lookup is not None and self.shares_store:
            # This engine may have copies of its own, which another one's reset does not reach.
            self._kept(request, local + external)
        elif lookup is not None and self.memory.was_reset:
            self._kept(request, local)
        self.trace.emit(
            "alloc",
            req=req,
            generation=generation,
            transfer=transfer,
            local=local,
            claimed=None if lookup is None else lookup.tokens,
            external=external,
            is_async=is_async,
            blocks=tables[0],
            shared_blocks=self._held_before(request, local),
            second_call=second_call,
            computed=request.num_computed_tokens,
            tables=self._tables(tables, local + external),
        )
        if transfer is not None:
            positions = (local, local + external)
            self._grant(transfer, (req, generation), positions, is_async, tables)
        if is_async:
            self.hold(req, "recv", transfer, "async load")

    def _grant(
        self,
        transfer: str,
        incarnation: Incarnation,
        positions: tuple[int, int],
        is_async: bool,
        tables: list[list[int]],
    ) -> None:
        """Note a load that the engine granted; each rank is owed its own shard of it."""
        shape = self._loads.shape
        grant = Grant(
            transfer, *incarnation, *positions, is_async, tables, shape.groups, shape.share
        )
        grant.started_step = self.trace.step
        self._loads.grants.append(grant)
        for loads in self.view.other_loads:
            shape = loads.shape
            shard = replace(grant, late=set(), failed=set(), groups=shape.groups, share=shape.share)
            loads.grants.append(shard)

    def _held_before(self, request: Any, local: int) -> list[int]:
        """Return the blocks of a request's local prefix-cache hit of `local` tokens."""
        blocks = self.view.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        return list(blocks[: local // self._loads.shape.groups[0].block_size])

    def _sources(self, call: Call) -> None:
        """Emit how many tokens of a hit have a source, if the class says where hits come from."""
        if call.error is not None or not _names_sources(type(call.connector)):
            return
        request = call.arg(0, "request")
        counts = call.result if isinstance(call.result, dict) else {}
        named = (count for source, count in counts.items() if source in _SOURCES)
        granted = call.arg(1, "num_external_tokens")
        self.trace.emit(
            "hit.sources",
            req=request.request_id,
            generation=self.view.generation(request.request_id),
            granted=granted,
            named=sum(count for count in named if isinstance(count, int)),
            needed=self._needed(request, granted),
        )

    def _needed(self, request: Any, granted: int) -> int:
        """Return how many granted tokens have a block in some group, or are part of a state."""
        groups = self._loads.shape.groups
        if any(group.recurrent for group in groups):
            return granted
        known = self._lookups.get(self._incarnation(request))
        start = 0 if known is None else known.local
        tables = self.view.tables().get(request.request_id, [])
        return sum(
            any(
                position // group.block_size < len(table) and table[position // group.block_size]
                for group, table in zip(groups, tables, strict=False)
            )
            for position in range(start, start + granted)
        )

    def _tables(self, tables: Iterable[Sequence[int]], end: int) -> list[list[Any]]:
        """Return of each group what the fields `tables` of events have.

        The window is that of the token at `end`, itself included.
        """
        shape = self._loads.shape
        return [
            [
                group.block_size,
                group.reach(end) or 0,
                list(table),
                shape.drafts if group.recurrent else 0,
            ]
            for group, table in zip(shape.groups, tables, strict=False)
        ]

    def _kept(self, request: Any, end: int) -> None:
        """Note content up to `end` that outlived a reset here, and may be saved again."""
        self.memory.kept(self._contents(request, end))

    def _keep_loading(self) -> None:
        """Note what requests are loading during a reset, or have loaded and not yet run with.

        They have it afterwards.
        """
        loading = {grant.key: grant.end for grant in self._loads.open_grants()}
        for (req, generation), end in (self._unused | loading).items():
            request = self.view.scheduler.requests.get(req)
            mine = request is not None and generation == self.view.generation(req)
            if mine and not request.is_finished():
                self._kept(request, end)

    # -- plans
    def planned(self, entry: Mapping[str, Any], slots: int | None) -> None:
        """Emit an entry of the plan that an Inspector has read from a step's metadata.

        `slots`: those of the request's block table.
        """
        incarnation = entry["req"], self.view.generation(entry["req"])
        self.trace.emit(
            "plan",
            **entry,
            generation=incarnation[1],
            renewed=self._losses + self._admissions[incarnation],
            slots=slots,
            kept=entry["op"] == "save" and slots is None and self._holds_blocks(),
            loading="recv" in self.held.get(entry["req"], ()),
        )

    def _holds_blocks(self) -> bool:
        """Return whether blocks have more references than the requests' tables account for."""
        owed = references(self.view.tables())
        pool = self.view.scheduler.kv_cache_manager.block_pool
        return any(
            block.ref_cnt > owed[block.block_id] for block in pool.blocks if not block.is_null
        )

    # -- holds
    def hold(self, req: str, direction: str, transfer: str | None, cause: str) -> None:
        """Note that the engine waits for a completion report of this request."""
        held = self.held.setdefault(req, set())
        if not held:
            self._reported[req] = set()
            self._both.discard(req)
        held.add(direction)
        if len(held) > 1:
            self._both.add(req)
        self.trace.emit(
            "hold",
            req=req,
            generation=self.view.generation(req),
            direction=direction,
            transfer=transfer,
            cause=cause,
        )

    def release(self, req: str, direction: str, cause: str) -> None:
        """Note that the engine took notice of a completion report."""
        if direction not in self.held.get(req, set()):
            return
        self.held[req].discard(direction)
        self.trace.emit(
            "release",
            req=req,
            generation=self.view.generation(req),
            direction=direction,
            transfer=None,
            cause=cause,
        )

    def _tail(self, call: Call) -> None:
        """Note that a connector keeps the blocks of a request that is about to finish."""
        if call.error is None and call.result is True:
            self._tails.add(self._incarnation(call.arg(0, "request")))

    def _finished(self, call: Call) -> None:
        request = call.arg(0, "request")
        blocks = call.arg(1, "block_ids")
        tables = list(blocks) if isinstance(blocks, tuple) else [list(blocks or [])]
        returned = call.result if call.error is None and isinstance(call.result, tuple) else ()
        req, generation = self._incarnation(request)
        keeps = bool(returned) and returned[0] is True
        delayed = keeps or (req, generation) in self._tails
        self.trace.emit(
            "req.finished",
            req=req,
            generation=generation,
            status=request.status.name,
            computed=request.num_computed_tokens,
            placeholders=request.num_output_placeholders,
            known=request.num_tokens,
            in_flight=request.num_in_flight_tokens,
            blocks=list(tables[0]) if tables else [],
            delayed=delayed,
            final=min(self.view.valid_end(req), request.num_tokens),
            tables=self._tables(tables, request.num_computed_tokens),
            hook=call.hook,
        )
        if delayed:
            hook = "request_finished" if keeps else "register_finished_partial_tail"
            self.hold(req, "send", None, f"{hook} returned True")

    # -- reports of the worker half
    def _results(self, call: Call) -> None:
        if call.legal:
            self.reported(call.result)

    def _errors(self, call: Call) -> None:
        if call.legal:
            self.load_errors(set(call.result or ()))

    def reported(self, results: Any) -> None:
        """Note the transfers that a worker reports as finished or failed.

        `results` has finished_sending, finished_recving and failed_recving, as vLLM's
        KVConnectorTransferResults and KVConnectorOutput do.
        """
        sending = results.finished_sending or ()
        received = results.finished_recving or ()
        failed = set(getattr(results, "failed_recving", ()) or ())
        for req in sorted(sending):
            self._report(req, "send", None)
        for req in sorted(received):
            self._report(req, "recv", self._open_async(req) or self._last_async(req))
        for req in sorted(failed):
            grant = self._open_async(req)
            self._fail(req, grant, sorted(grant.blocks) if grant else [], [])
            if grant:
                grant.given_up = True
        # The engine takes no notice of a synchronous load here.
        self._loads.failed_reqs = {req for req in failed if self._open_async(req)}
        self.received = list(received)

    def _reports_come(self, call: Call) -> None:
        call.scratch["ended"] = ended_transfers(call.arg(0, "connector_output"))

    def _reports_go_on(self, call: Call) -> None:
        """Note the ends of transfers that the scheduler half adds to a step's reports, or keeps.

        The engine reads them only after the hook. A connector must not keep reports of siblings.
        """
        added = added_ends(call)
        for direction, req in sorted(added, reverse=True):
            is_load = direction == "recv"
            grant = (self._open_async(req) or self._last_async(req)) if is_load else None
            self._report(req, direction, grant, BY_SCHEDULER)
        after = ended_transfers(call.arg(0, "connector_output"))
        for direction, req in sorted(call.scratch["ended"] - after):
            is_own = self._keep_back(req, direction)
            if not is_own and call.result_event is not None and call.error is None:
                self.trace.amend(call.result_event, mutated_args=True)

    def _keep_back(self, req: str, direction: str) -> bool:
        """Turn the latest report of each rank into one that the engine never got.

        Returns whether there is one.
        """
        self._reported.get(req, set()).discard(direction)
        on = getattr(self.trace, ENGINE_FIELD, None)
        this = on, req, self.view.generation(req), direction
        reports = (
            e
            for e in self.trace.events
            if e["kind"] == "transfer.reported" and e["rank"] != BY_SCHEDULER
        )
        latest = {
            e["rank"]: e
            for e in reports
            if (e.get(ENGINE_FIELD), e["req"], e["generation"], e["direction"]) == this
        }
        for event in latest.values():
            self.trace.amend(event, kind="transfer.withheld")
        return bool(latest)

    def _report(self, req: str, direction: str, grant: Grant | None, rank: int = 0) -> None:
        seen = self._reported.setdefault(req, set())
        if direction == "recv" and grant and grant.key not in self._failed_loads:
            self._unused[grant.key] = grant.end
        self.trace.emit(
            "transfer.reported",
            req=req,
            generation=self.view.generation(req),
            transfer=grant.transfer if grant else None,
            rank=rank,
            direction=direction,
            held=direction in self.held.get(req, set()),
            second=req in self._both and bool(seen - {direction}),
        )
        seen.add(direction)

    def load_errors(self, blocks: set[int]) -> None:
        """Note the blocks that a worker reports as not loaded."""
        loads = self._loads
        loads.failed_blocks = blocks
        if blocks and len(loads.shape.groups) > 1:  # the ids do not show their group
            self._fail(None, None, sorted(blocks), [])
            return
        left = set(blocks)
        for grant in loads.open_grants():
            hit = blocks & grant.blocks
            if hit and grant.req not in loads.failed_reqs:
                self._fail(grant.req, grant, sorted(hit), [])
                grant.failed |= hit
            if hit:
                left -= hit | grant.behind
        if left:
            self._fail(None, None, sorted(blocks), sorted(left))

    def _open_async(self, req: str) -> Grant | None:
        grants = self._loads.open_grants()
        return next((g for g in grants if g.req == req and g.is_async), None)

    def _last_async(self, req: str) -> Grant | None:
        key = req, self.view.generation(req)
        grants = reversed(self._loads.grants)
        return next((g for g in grants if g.key == key and g.is_async), None)

    def _fail(
        self, req: str | None, grant: Grant | None, blocks: list[int], outside: list[int]
    ) -> None:
        self.trace.emit(
            "transfer.failed",
            req=req,
            transfer=grant.transfer if grant else None,
            rank=0,
            blocks=blocks,
            outside_grant=outside,
            groups=len(self._loads.shape.groups),
            is_async=bool(grant and grant.is_async),
            loading=any(g.req == req for g in self._loads.open_grants()),
        )
        self._losses += 1
        self.activity += 1  # content that a load did not find is gone for other requests too
        if grant is None:
            self._unused.clear()
        else:
            self._unused.pop(grant.key, None)
            self._failed_loads.add(grant.key)
            claim = (*grant.key, grant.end - grant.start)
            known = self._failed_claims.setdefault(claim, set())
            if self.sees_arrivals and grant.transfer not in known:
                self._count_failure(grant)
            known.add(grant.transfer)

    def _count_failure(self, grant: Grant) -> None:
        request = self.view.scheduler.requests.get(grant.req)
        if request is not None and grant.end > 0:
            content = self._contents(request, grant.end)[-1]
            self.memory.failed[content] = self.memory.failed.get(content, 0) + 1

    def arrived(self, grant: Grant, content: int) -> None:
        """Note that a load up to this content id is complete on a rank.

        If it has failed on no rank, the failures of others before it were passing ones.
        """
        failed = self._failed_claims.get((*grant.key, grant.end - grant.start), ())
        if grant.transfer not in failed:
            self.memory.repaired([content])

    # -- reset
    def _resetting(self, call: Call) -> None:
        self._emit_reset("called", None)

    def _reset(self, call: Call) -> None:
        if call.error is not None:
            return
        self._emit_reset("returned", call.result)
        if call.result is not False:
            self.memory.reset(self.view.held_contents())
            self._keep_loading()
            self.reset_after = self.trace.step
            self._lost()

    def reset_elsewhere(self) -> None:
        """Note that another engine has reset the store; this one's connector does not hear of it.

        It may save again what its requests hold.
        """
        self.memory.kept(self.view.held_contents())
        self._keep_loading()
        self._lost()

    def _lost(self) -> None:
        """Note that the store was emptied: less is found, and the same may be saved again.

        A load that is under way may fail.
        """
        self._loads.promised.clear()
        self._losses += 1
        self.activity += 1

    def _emit_reset(self, phase: str, returned: Any) -> None:
        running = bool(self.view.scheduler.running)
        self.trace.emit(
            "cache.reset", phase=phase, returned=returned, running=running, connector=True
        )


_SOURCES = ("host", "p2p", "disk")
"""The values of vLLM's CacheHitSource that a connector may name."""


def _names_sources(connector: type) -> bool:
    """Return whether a class says where its hits come from, by its label or by a method."""
    method = "get_external_cache_hit_sources"
    owner = next((cls for cls in connector.__mro__ if method in vars(cls)), None)
    labelled = getattr(connector, "_cache_hit_source", None) in _SOURCES
    return labelled or (owner is not None and owner.__name__ != "KVConnectorBase_V1")


def starved(scheduler: Any, request: Any, end: int, block_size: int) -> bool:
    """Return whether a load up to `end` tokens waits for blocks of loads that are over.

    vLLM's scheduler leaves a request whose asynchronous load failed completely, be it a sibling's,
    among the prefills in flight, and keeps blocks free for it. It also leaves it in front of those
    that hold blocks: if they could go on, they do not as long as it waits for what they hold.
    False where the engine reserves nothing, has several KV cache groups, or lacks blocks for
    another reason. Reads only.
    """
    inflight = getattr(scheduler, "_inflight_prefills", ())
    manager = scheduler.kv_cache_manager
    if request not in inflight:
        return False
    tables = manager.get_block_ids(request.request_id)
    if any(tables) or len(tables) != 1:
        return False
    remaining = scheduler._request_remaining_blocks
    verifying = getattr(scheduler, "_spec_decode_step_blocks", 0)
    verifying = verifying() if callable(verifying) else verifying  # a method until 0.31
    kept = sum(remaining(other) for other in inflight if other is not request) + verifying
    spare = manager.block_pool.get_num_free_blocks() - kept - -(-end // block_size)
    if spare >= 0:
        return bool(spare < remaining(request))
    waiting = getattr(scheduler, "kv_holding_waiting", ())
    for other in (each for each in waiting if each is not request):
        loads = other.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        if not loads or other.request_id in scheduler.finished_recving_kv_req_ids:
            spare += sum(map(len, manager.get_block_ids(other.request_id)))
            spare += remaining(other) if other in inflight else 0
    return bool(spare >= 0)


def added_ends(call: Call) -> set[tuple[str, str]]:
    """Return the ended transfers that the scheduler half added in this update_connector_output."""
    ended: set[tuple[str, str]] = call.scratch["ended"]
    return ended_transfers(call.arg(0, "connector_output")) - ended


def emit_layer(
    trace: Trace, call: Call, registered: Mapping[str, Any], *, joined: bool = False
) -> None:
    """Emit layer.wait or layer.save for a call of that hook.

    `registered`: KV tensors by layer. `joined`: the compute stream waited for all work that the
    hook gave to other streams.
    """
    name = call.arg(0, "layer_name")
    bound = bool(call.event and call.event["bound"])
    if call.hook == "wait_for_layer_load":
        trace.emit("layer.wait", layer=name, bound=bound)
        return
    tensor = registered.get(name)
    given = call.arg(1, "kv_layer")
    whole = tensor is None or (
        given.data_ptr() == tensor.data_ptr() and given.numel() == tensor.numel()
    )
    trace.emit("layer.save", layer=name, bound=bound, whole=whole, joined=joined)


def _claim(result: Any) -> tuple[Any, bool, bool]:
    """Return (tokens, is_async, type_ok) of a lookup; (None, False, False) for a malformed one."""
    if not isinstance(result, tuple) or len(result) != 2:
        return None, False, False
    tokens, is_async = result
    if isinstance(tokens, bool) or not (tokens is None or isinstance(tokens, (int, float))):
        return None, False, False
    type_ok = (tokens is None or type(tokens) is int) and isinstance(is_async, bool)
    return tokens, bool(is_async), type_ok
