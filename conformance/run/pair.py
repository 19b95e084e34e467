# SPDX-License-Identifier: Apache-2.0
"""Driver of several engines that run one case in lockstep.

The engines share a store, or are producer and consumer. For the latter the driver passes the
kv_transfer_params of one engine's requests to the other's, as a proxy does, and records what they
bring about.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvconform.config.router import Params
from kvconform.contract.steps import Add, Handed, OnStep, Step
from kvconform.contract.trace import Event, PairTrace, Trace
from kvconform.engine.configs import engine_id_of
from kvconform.engine.engine import Engine
from kvconform.kv.provenance import PartMemory, text_id
from kvconform.observe.call import Call
from kvconform.observe.telemetry import HashBook
from kvconform.process import alive
from kvconform.run import dead_threads
from kvconform.run.driver import Driver
from kvconform.run.records import common_prefix

FINISHED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
SHORTEST_LEASE = 2
"""Steps. No lease is as short: a consumer could hardly come before it ends."""
COUNTED_LEASE = 4
"""Steps. No lease ends as early under a load that has begun; a consumer's note may."""
FIRST_TOKEN = ("first_tok", "first_token", "first_token_id")
"""Names of the parameter in which connectors pass the producer's first token."""


@dataclass(frozen=True)
class Handover:
    """Parameters of request `of` that were passed to request `req` of engine `on`.

    `name` and `of_name` are the requests' names in the case. `stale` says why the parameters refer
    to nothing: `altered`, `replayed`, or "" if they do not. `unlike`: the two engines have
    different block sizes, ranks or data types.
    """

    on: str
    name: str
    req: str
    of_name: str
    of: str
    stale: str
    unlike: bool


class Handovers:
    """Handovers of one run. Emits pair.params, pair.lookup and pair.request."""

    def __init__(self, trace: Trace, driver: PairDriver) -> None:
        self.trace = trace
        self.driver = driver
        self.state = driver.state
        self.asked: dict[str, tuple[str, Params]] = {}
        """The producer's engine id, and the parameters sent to it, by the request's name."""
        self.returned: dict[str, Params] = {}
        self.handed: dict[str, Handover] = {}
        self.sampled: dict[str, int | None] = {}

    def listen(self, engine: Engine) -> None:
        """Record what an engine's connector returns for finished requests and for lookups."""
        for hook in ("request_finished", "request_finished_all_groups"):
            engine.probe.on(hook, after=self._finished)
        engine.probe.on("get_num_new_matched_tokens", after=lambda call: self._lookup(call, engine))

    def _finished(self, call: Call) -> None:
        request = call.arg(0, "request")
        self.sampled[request.request_id] = next(iter(request.output_token_ids), None)
        self.returned[request.request_id] = call.result[1] if call.legal else None

    def take(self, handed: Handed, on: str, add: Add) -> Params:
        """Return the parameters for request `add` of engine `on`.

        What the producer returned passes through msgpack, as from engine to front end, and through
        JSON, as from front end to router; what the router makes of it, too.
        """
        if self.driver.engine.connector is None:
            return None
        of = self.state.ids[handed.of]
        req = self.state.ids[add.req]
        unlike = not self.driver.variant.are_alike(on, self.driver.added_on[handed.of])
        ended = self._ended(of)
        returned, problem = _through_json(self.returned.get(of))
        has_ended = ended is not None and ended["status"] in FINISHED
        params = returned
        if handed.of in self.asked and (has_ended or self.driver.router.at_once):
            producer, sent = self.asked[handed.of]
            params = self.driver.router.decode(of, producer, sent, returned)
            params, _ = _through_json(params)
        if returned is None and self._gives_up(of, ended):
            params, has_ended = None, False
        altered = _altered(params, handed.alter)
        stale = ""
        if altered:
            stale = "altered"
        elif any(earlier.of == of for earlier in self.handed.values()):
            stale = "replayed"
        if params is not None:
            self.handed[req] = Handover(on, add.req, req, handed.of, of, stale, unlike)
            if not has_ended:
                self.driver.engine.observer.computed_meanwhile.add(req)
        tokens = [returned[name] for name in FIRST_TOKEN if returned and name in returned]
        self.trace.emit(
            "pair.params",
            on=on,
            req=req,
            generation=0,
            of=of,
            unlike=unlike,
            asked=self.state.adds[handed.of].hand_over,
            finished=has_ended,
            none=params is None,
            tokens=0 if ended is None else ended["final"],
            json=problem,
            first_token=next((token for token in tokens if isinstance(token, int)), None),
            sampled=self.sampled.get(of),
        )
        if params is None:
            return None
        return {**add.params, **params, **altered}

    def _gives_up(self, of: str, ended: Event | None) -> bool:
        """Return whether a producer's request ended with a stop token, and nothing was kept of it.

        vLLM's Mooncake and MoRIIO connectors hand over only what ends at its length.
        """
        kept = any(e["kind"] == "hold" and e["req"] == of for e in self.trace.events)
        return ended is not None and ended["status"] == "FINISHED_STOPPED" and not kept

    def _ended(self, req: str) -> Event | None:
        """Return the latest req.finished event of a request, or None."""
        for event in reversed(self.trace.events):
            if event["kind"] == "req.finished" and event["req"] == req:
                return event
        return None

    # -- lookups

    def _lookup(self, call: Call, engine: Engine) -> None:
        if not call.legal or not isinstance(call.result, tuple):
            return
        if not isinstance(call.result[0], (int, type(None))):
            return
        request = call.arg(0, "request")
        on = next(name for name, each in self.driver.engines.items() if each is engine)
        req = request.request_id
        handed = self.handed.get(req)
        self.trace.emit(
            "pair.lookup",
            on=on,
            role=self.driver.roles[on],
            req=req,
            generation=0,
            of=handed.of if handed else None,
            stale=handed.stale if handed else None,
            local=call.arg(1, "num_computed_tokens"),
            tokens=call.result[0],
            by_savers=self._computed(request, self.driver.savers()),
            by_all=self._computed(request, [*self.driver.memories.values()]),
            consumed=any(g.req == req and not g.open for g in engine.oracle.grants),
            delivered=None,
            failed=None,
        )

    def _computed(self, request: Any, by: Sequence[PartMemory]) -> int:
        """Count the tokens of the request's prefix that any of some engines has computed."""
        identity = self.state.info(request.request_id).identity
        known = [memory.own for memory in by]
        for position, content in enumerate(identity.contents(request.all_token_ids)):
            if not any(content in own for own in known):
                return position
        return int(request.num_tokens)

    # -- the end

    def end(self) -> None:
        """Complete the pair.lookup events, and sum up every request that got parameters.

        Sets their fields `delivered` and `failed`, and emits pair.request.
        """
        events = self.trace.events
        failed = {e["transfer"] for e in events if e["kind"] == "transfer.failed" and e["transfer"]}
        for handed in self.handed.values():
            mine = [e for e in events if e.get("req") == handed.req]
            dues = [e for e in mine if e["kind"] == "load.due"]
            good = [e for e in dues if not (e["missing"] or e["wrong"] or e["transfer"] in failed)]
            for lookup in mine:
                if lookup["kind"] == "pair.lookup" and lookup["consumed"]:
                    owed = self._owed(lookup, mine)
                    self.trace.amend(
                        lookup,
                        delivered=owed is None or any(e["transfer"] == owed for e in good),
                        failed=owed is not None and owed in failed,
                    )
            self._sum_up(handed, mine, dues, good, failed)

    @staticmethod
    def _owed(lookup: Event, mine: list[Event]) -> str | None:
        """Return the transfer of the tokens that a lookup promised; None if none were granted."""
        grants = (e for e in mine if e["kind"] == "alloc" and not e["second_call"])
        grant = next((e for e in grants if e["seq"] > lookup["seq"]), None)
        return grant["transfer"] if grant is not None and grant["external"] else None

    def _sum_up(
        self,
        handed: Handover,
        mine: list[Event],
        dues: list[Event],
        good: list[Event],
        failed: set[str],
    ) -> None:
        """Emit pair.request for a request that got parameters.

        `mine` are its events; of its load.due events `dues`, `good` are the complete ones. `failed`
        has the ids of failed transfers.
        """
        events = self.trace.events
        ended = self._ended(handed.of)
        offered = 0
        if ended is not None and ended["status"] in FINISHED:
            prompts = self.state.prompts
            offered = min(
                common_prefix(prompts[handed.name], prompts[handed.of_name]), ended["final"]
            )
        aborted = any(e["kind"] == "req.finished" and e["status"] not in FINISHED for e in mine)
        grants = [e for e in mine if e["kind"] == "alloc" and not e["second_call"]]
        sends = [e for e in events if e.get("req") == handed.of and e.get("direction") == "send"]
        # What a lease released because the clock was set forward does not count.
        leaps = (e for e in events if e["kind"] == "clock.advanced" and e["why"] == "stall")
        until = next((e["seq"] for e in leaps), math.inf)
        reports = [e["seq"] for e in sends if e["kind"] == "transfer.reported"]
        released = [seq for seq in self._released(handed, sends) if seq < until]
        lookups = [e for e in mine if e["kind"] == "lookup" and e["tokens"] is not None]
        came = next((e["seq"] for e in (*dues, *mine)), math.inf)
        # A producer may have read it all, and report, before the consumer's engine hears of it.
        asked = next((e["seq"] for e in grants if e["external"]), came)
        early = bool(reports) and reports[0] < asked
        lacking = [e for e in dues if e["missing"] and e["needed"] and not e["reported_failed"]]
        wrong = [*lacking, *(e for e in dues if e["wrong"])]
        promised = max((e["tokens"] for e in lookups), default=0)
        self.trace.emit(
            "pair.request",
            on=handed.on,
            req=handed.req,
            generation=0,
            of=handed.of,
            stale=handed.stale,
            unlike=handed.unlike,
            aborted=aborted,
            offered=offered,
            local=max((e["local"] for e in grants), default=0),
            promised=promised,
            refused=promised > 0 and bool(grants) and not any(e["external"] for e in grants),
            loaded=sum(e["granted"] for e in good),
            wrong=any(e["transfer"] not in failed for e in wrong),
            failed=any(e["transfer"] in failed for e in dues),
            held=any(e["kind"] == "hold" for e in sends),
            released=len(released),
            gone=early or self._expired(sends, dues, failed),
            early=early,
            at_once=early and self._at_once(handed.of, sends),
        )

    def _released(self, handed: Handover, sends: list[Event]) -> list[int]:
        """Return the places of the events by which the producer's engine heard of a release.

        `sends` are the events about what it holds for the request. Of several ranks, all have to
        report it; what the scheduler half adds is heard at once.
        """
        joined = [e for e in self.trace.events if e["kind"] == "ranks.joined"]
        producer = self.driver.added_on[handed.of_name]
        if not any(e["on"] == producer for e in joined):
            return [e["seq"] for e in sends if e["kind"] == "transfer.reported"]
        added = [e["seq"] for e in sends if e["kind"] == "transfer.reported" and e["rank"] < 0]
        return added + [e["seq"] for e in joined if handed.of in e["sent"] and e["on"] == producer]

    def _expired(self, sends: list[Event], dues: list[Event], failed: set[str]) -> bool:
        """Return whether a lease may have ended before a load that failed was due.

        `sends` are the events about what the producer holds for the request; of the load.due events
        `dues`, those with an id in `failed` failed. A push, or a pull that is reported later, is
        over before the load is due, and a consumer's note ends what the producer holds. So a
        release up to then says nothing, except where it may have been a lease that ended.
        """
        lost = next((e["seq"] for e in dues if e["transfer"] in failed), -1)
        report = next((e for e in sends if e["kind"] == "transfer.reported"), None)
        if report is None or report["seq"] > lost:
            return False
        steps = self._held_for(sends, report)
        return steps is not None and steps > COUNTED_LEASE

    def _at_once(self, of: str, sends: list[Event]) -> bool:
        """Return whether a producer released a request too soon for any lease to have ended.

        `sends` are the events about what it holds for the request, which it has reported. It may
        release that as soon as one consumer has what it wants, or when time passes.
        """
        report = next(e for e in sends if e["kind"] == "transfer.reported")
        steps = self._held_for(sends, report)
        if steps is None or steps > SHORTEST_LEASE:
            return False
        before = (e for e in self.trace.events if e["seq"] < report["seq"])
        return not any(e["kind"] == "pair.lookup" and e["of"] == of for e in before)

    def _held_for(self, sends: list[Event], report: Event) -> float | None:
        """Return for how many steps a producer held what it released by `report`.

        Without end if the clock was set forward meanwhile; None if it held nothing.
        """
        hold = next((e for e in sends if e["kind"] == "hold"), None)
        if hold is None:
            return None
        meanwhile = (e for e in self.trace.events if hold["seq"] < e["seq"] < report["seq"])
        if any(e["kind"] == "clock.advanced" for e in meanwhile):
            return math.inf
        return float(report["step"] - hold["step"])


def _altered(params: Params, alter: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a case alters of these parameters: those of its names that they have."""
    has = params or {}
    return {name: value for name, value in alter.items() if has.get(name, value) != value}


def _through_json(params: Params) -> tuple[Params, str | None]:
    """Return what arrives at the other engine, and what is wrong with it, or None."""
    if params is None:
        return None, None
    try:
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params), strict=False)
        arrived = json.loads(json.dumps(sent, allow_nan=False))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        return None, f"{type(error).__name__}: {error}"[:200]
    changed = sorted(str(key) for key in sent if key not in arrived or arrived[key] != sent[key])
    return arrived, f"{', '.join(changed)} arrived changed" if changed else None


class PairDriver(Driver):
    """Driver of the engines of `config.engines`; `engine` is the one that the next step uses."""

    engines: dict[str, Engine]
    trace: PairTrace

    def _table(self) -> Mapping[str, Callable[[Any], None]]:
        return {**super()._table(), "on": self._turn_to}

    def _start(self) -> Engine:
        self.roles: dict[str, str] = dict(self.variant.case.config.roles)
        parts: list[PartMemory] = []
        self.memories = {name: PartMemory(self.state.memory, parts) for name in self.roles}
        self.handovers = Handovers(self.trace, self)
        self.engines = {}
        self.engine_ids: dict[str, str] = {}
        self.added_on: dict[str, str] = {}
        own = {name: self.variant.of_engine(name).sizes for name in self.variant.case.config.own}
        self.trace.emit("run.engines", engines=self.roles, own=own)
        for name in self.roles:
            self.trace.on = name
            self.engines[name] = self._start_engine(name)
        books: dict[int, HashBook] = {}
        announced = [engine.telemetry.announced for engine in self.engines.values()]
        for engine in self.engines.values():
            book = books.setdefault(engine.variant.hash_size, engine.watch.book)
            engine.watch.book = engine.telemetry.book = book
            engine.telemetry.withdrawn_from = announced
        self._turn_to(next(iter(self.roles)))
        return self.engine

    def _start_engine(self, name: str) -> Engine:
        variant = self.variant.of_engine(name)
        self.engine_ids[name] = engine_id_of(variant, self.tmp)
        target = dataclasses.replace(self.target, role=None)
        engine = self._build(variant, target, self.memories[name])
        delivery = None if engine.connector is None else bool(engine.connector.requires_kv_delivery)
        self.trace.emit("pair.engine", on=name, role=self.roles[name], delivery=delivery)
        self.handovers.listen(engine)
        engine.observer.shares_store = True
        engine.probe.on("reset_cache", after=lambda call: self._store_was_reset(engine, call))
        return engine

    def _store_was_reset(self, by: Engine, call: Call) -> None:
        """Let the observers of the other engines know: their connectors hear nothing of it."""
        if call.error is not None or call.result is False:
            return
        for engine in self.engines.values():
            if engine is not by:
                engine.observer.reset_elsewhere()

    def savers(self) -> list[PartMemory]:
        """Return the memories of the engines that may save."""
        return [
            memory for name, memory in self.memories.items() if self.roles[name] != "kv_consumer"
        ]

    # -- steps

    def _turn_to(self, name: str) -> None:
        self.trace.on = name
        self.engine = self.engines[name]

    def add(self, add: Add) -> None:
        """Add a request to the engine that the next step uses."""
        self.added_on[add.req] = self.trace.on or ""
        super().add(add)

    def _id_of(self, add: Add) -> str:
        if add.id or not self.router.shares_ids:
            return super()._id_of(add)
        base = add.req if add.handed is None else add.handed.of
        # The suffix is as long as the one of vLLM's input processor, but the same in every run.
        return f"{base}-{text_id(add.req) % 2**32:08x}"

    def _asking_for_transfer(self, add: Add) -> dict[str, Any]:
        producer = self.engine_ids[self.trace.on or ""]
        sent = self.router.prefill(self.state.ids[add.req], producer)
        self.handovers.asked[add.req] = (producer, sent)
        return sent or {}

    def _params(self, add: Add) -> dict[str, Any] | None:
        if add.handed is None:
            return super()._params(add)
        return self.handovers.take(add.handed, self.trace.on or "", add)

    @property
    def named_engines(self) -> Mapping[str, Engine]:
        """The engines that are driven, by their names."""
        return self.engines

    def _round(self, steps: Sequence[Step]) -> Sequence[Step]:
        """Return the steps, begun on the engine on which a case begins."""
        return [OnStep(on=next(iter(self.engines))), *steps]

    def settle(self, steps: int) -> None:
        """Iterate until nothing is left to do, then do steps without work on each engine."""
        self.run_dry()
        self._on_each(self.engines, lambda: self.idle(steps))

    def _rest(self) -> None:
        """Do steps without work on each engine that has no requests: any of them may be storing."""
        self._on_each(self.engines, super()._rest)

    def _on_each(self, names: Iterable[str], do: Callable[[], object]) -> None:
        """Do something on each of these engines, and turn back to the one in use."""
        here = self.trace.on or ""
        for name in names:
            self._turn_to(name)
            do()
        self._turn_to(here)

    def _iterate_until(self, over: Callable[[], bool], limit: int | None = None) -> None:
        here = self.trace.on or ""
        super()._iterate_until(over, limit)
        self._turn_to(here)

    def _step(self, count: int) -> None:
        """Do steps of this engine; after each, the others announce the ends of their requests.

        An engine does that by itself: it steps once more when a request has finished, and only then
        do its workers know what is offered.
        """
        for _ in range(count):
            super()._step(1)
            due = [
                name
                for name, engine in self.engines.items()
                if engine is not self.engine and engine.scheduler.has_finished_requests()
            ]
            self._on_each(due, lambda: self.engine.iterate())

    def _iterate(self) -> None:
        for name in [name for name, engine in self.engines.items() if engine.busy]:
            self._turn_to(name)
            self.engine.iterate()

    # -- end

    def close(self, *, shut_down: bool, crashed: bool = False) -> None:
        """Emit run.end for every engine, then shut them down unless the case did that already."""
        self.state.works_aside = self.state.works_aside or alive.works_aside()
        dead_threads.emit()
        if not crashed:
            self.handovers.end()
        for name in self.engines:
            self._turn_to(name)
            # A level may be shared, and has the KV of all engines then.
            self._conclude_cache(sizes=False)
        if any(engine.ledger.leaked() for engine in self.engines.values()):
            gc.collect()  # the objects may be a cycle of garbage
        ends = [
            self.trace.emit("run.end", on=name, **self._end_of(engine, crashed=crashed))
            for name, engine in self.engines.items()
        ]
        if shut_down:
            self.shutdown()
        threads = self.left_threads(crashed=crashed)
        for end in ends:
            self.trace.amend(end, threads=threads)

    def shutdown(self) -> None:
        """Shut down the connectors of every engine."""
        dead_threads.excuse()
        for name, engine in self.engines.items():
            self._turn_to(name)
            engine.shutdown()
