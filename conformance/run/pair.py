# SPDX-License-Identifier: Apache-2.0
"""Drives two engines through one case in lock step.

Over one store, or as producer and consumer: then it carries the kv_transfer_params of one engine's
requests to the other's, as a proxy does, and keeps the books of what they brought.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvconform.contract.case import Config
from kvconform.contract.steps import Run as RunArgument
from kvconform.contract.trace import Event, PairTrace, Trace
from kvconform.engine.engine import Engine
from kvconform.kv.provenance import ROOT, PartMemory, extend
from kvconform.observe.call import Call
from kvconform.run.driver import Driver, StallDetector

FINISHED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
FIRST_TOKEN = ("first_tok", "first_token", "first_token_id")
"""Names under which connectors hand the producer's first token over."""


@dataclass(frozen=True)
class Handover:
    """Request `req` of engine `on` got the parameters that request `of` ended with; `stale`: what makes them refer to nothing, or ''."""

    on: str
    name: str
    req: str
    of_name: str
    of: str
    stale: str


class Handovers:
    """Of one run. Emits pair.params, pair.lookup and pair.request."""

    def __init__(self, trace: Trace, driver: PairDriver) -> None:
        self.trace, self.driver, self.state = trace, driver, driver.state
        self.returned: dict[str, dict[str, Any] | None] = {}
        self.handed: dict[str, Handover] = {}
        self.sampled: dict[str, int | None] = {}

    def listen(self, engine: Engine) -> None:
        """Keep what the connector returns for finished requests, and look at its lookups."""
        for hook in ("request_finished", "request_finished_all_groups"):
            engine.probe.on(hook, after=self._finished)
        engine.probe.on("get_num_new_matched_tokens", after=lambda call: self._lookup(call, engine))

    def _finished(self, call: Call) -> None:
        request = call.arg(0, "request")
        self.sampled[request.request_id] = next(iter(request.output_token_ids), None)
        self.returned[request.request_id] = call.result[1] if call.legal else None

    def take(self, handed: Any, on: str, add: Any) -> dict[str, Any] | None:
        """The parameters for request `add` of engine `on`, through msgpack (engine to front end) and JSON (front end to client)."""
        if self.driver.engine.connector is None:
            return None
        of, req = self.state.ids[handed.of], add.id or add.req
        stale = (
            "altered"
            if handed.alter
            else "replayed"
            if any(h.of == of for h in self.handed.values())
            else ""
        )
        self.handed[req] = Handover(on, add.req, req, handed.of, of, stale)
        params, problem = _through_json(self.returned.get(of))
        ended = self._ended(of)
        self.trace.emit(
            "pair.params",
            on=on,
            req=req,
            generation=0,
            of=of,
            asked=self.state.adds[handed.of].hand_over,
            finished=ended is not None and ended["status"] in FINISHED,
            none=params is None,
            json=problem,
            first_token=next(
                (params[k] for k in FIRST_TOKEN if params and isinstance(params.get(k), int)), None
            ),
            sampled=self.sampled.get(of),
        )
        if params is None:
            return None
        return {**params, **add.params, **{k: v for k, v in handed.alter.items() if k in params}}

    def _ended(self, req: str) -> Event | None:
        return next(
            (
                e
                for e in reversed(self.trace.events)
                if e["kind"] == "req.finished" and e["req"] == req
            ),
            None,
        )

    # -- lookups ---------------------------------------------------------------------------------------------------------------
    def _lookup(self, call: Call, engine: Engine) -> None:
        if (
            not call.legal
            or not isinstance(call.result, tuple)
            or not isinstance(call.result[0], (int, type(None)))
        ):
            return
        request, on = (
            call.arg(0, "request"),
            next(n for n, e in self.driver.engines.items() if e is engine),
        )
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
            by_savers=self._by_savers(request),
            consumed=any(g.req == req and not g.open for g in engine.oracle.grants),
            delivered=None,
        )

    def _by_savers(self, request: Any) -> int:
        """Tokens of the request's prefix that engines which may save have computed."""
        identity, chain = self.state.info(request.request_id).identity, ROOT
        known = [memory.own for memory in self.driver.savers()]
        for position, token in enumerate(request.all_token_ids):
            chain = extend(chain, token, identity.extra(position))
            if not any(chain in own for own in known):
                return position
        return int(request.num_tokens)

    # -- the end ---------------------------------------------------------------------------------------------------------------
    def end(self) -> None:
        """Fill in what became of promises, and sum up every request that was handed parameters."""
        events = self.trace.events
        failed = {e["transfer"] for e in events if e["kind"] == "transfer.failed" and e["transfer"]}
        for handed in self.handed.values():
            mine = [e for e in events if e.get("req") == handed.req]
            dues = [e for e in mine if e["kind"] == "load.due"]
            good = [e for e in dues if not (e["missing"] or e["wrong"] or e["transfer"] in failed)]
            for lookup in mine:
                if lookup["kind"] == "pair.lookup" and lookup["consumed"]:
                    delivered = self._delivered(lookup, mine, good)
                    self.trace.amend(lookup, delivered=delivered)
            self._sum_up(handed, mine, dues, good, failed)

    @staticmethod
    def _delivered(lookup: Event, mine: list[Event], good: list[Event]) -> bool:
        """Whether the tokens that a repeated lookup promised arrived. `good`: complete loads."""
        grants = (e for e in mine if e["kind"] == "alloc" and not e["second_call"])
        grant = next((e for e in grants if e["seq"] > lookup["seq"]), None)
        if grant is None or not grant["external"]:
            return True  # nothing was granted, so nothing is owed
        return any(e["transfer"] == grant["transfer"] for e in good)

    def _sum_up(
        self,
        handed: Handover,
        mine: list[Event],
        dues: list[Event],
        good: list[Event],
        failed: set[str],
    ) -> None:
        events = self.trace.events
        ended, aborted = (
            self._ended(handed.of),
            any(e["kind"] == "req.finished" and e["status"] not in FINISHED for e in mine),
        )
        tokens, theirs = self.state.prompts[handed.name], self.state.prompts[handed.of_name]
        common = next(
            (i for i, (a, b) in enumerate(zip(tokens, theirs, strict=False)) if a != b),
            min(len(tokens), len(theirs)),
        )
        offered = (
            min(common, ended["final"]) if ended is not None and ended["status"] in FINISHED else 0
        )
        sends = [e for e in events if e.get("req") == handed.of and e.get("direction") == "send"]
        released = [e["seq"] for e in sends if e["kind"] == "transfer.reported"]
        lookups = [e for e in mine if e["kind"] == "lookup" and e["tokens"] is not None]
        wrong = [e for e in dues if (e["missing"] and not e["reported_failed"]) or e["wrong"]]
        self.trace.emit(
            "pair.request",
            on=handed.on,
            req=handed.req,
            generation=0,
            of=handed.of,
            stale=handed.stale,
            aborted=aborted,
            offered=offered,
            local=max(
                (e["local"] for e in mine if e["kind"] == "alloc" and not e["second_call"]),
                default=0,
            ),
            promised=max((e["tokens"] for e in lookups), default=0),
            loaded=sum(e["granted"] for e in good),
            wrong=any(e["transfer"] not in failed for e in wrong),
            failed=any(e["transfer"] in failed for e in dues),
            held=any(e["kind"] == "hold" for e in sends),
            released=len(released),
            gone=bool(released and dues) and released[0] < dues[0]["seq"],
        )


def _through_json(params: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str | None]:
    """What arrives at the other engine, and what is wrong with it (None: nothing)."""
    if params is None:
        return None, None
    try:
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params), strict=False)
        arrived = json.loads(json.dumps(sent, allow_nan=False))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        return None, f"{type(error).__name__}: {error}"[:200]
    changed = sorted(str(key) for key in sent if key not in arrived or arrived[key] != sent[key])
    return arrived, f"{', '.join(changed)} arrived changed" if changed else None


RUN_LIMIT = 1_000


class EngineConfig(Config):
    """What one of several engines is built from: its role is its own, and its engine id ends with its name."""

    name: str

    @property
    def suffix(self) -> str:
        return f"-{self.name}"


class PairDriver(Driver):
    """Owns the engines of `config.engines`; `engine` is the one that the next step is about."""

    engines: dict[str, Engine]
    trace: PairTrace

    def _table(self) -> Mapping[str, Callable[[Any], None]]:
        return {**super()._table(), "on": self._turn_to}

    def _start(self) -> Engine:
        self.roles: dict[str, str] = dict(self.variant.case.config.engines)
        self.memories = {name: PartMemory(self.state.memory) for name in self.roles}
        self.handovers = Handovers(self.trace, self)
        self.engines = {}
        self.trace.emit("run.engines", engines=self.roles)
        for name in self.roles:
            self.trace.on = name
            self.engines[name] = self._start_engine(name)
        first = next(iter(self.roles))
        book = self.engines[first].watch.book
        announced = [engine.telemetry.stored for engine in self.engines.values()]
        for engine in self.engines.values():
            engine.watch.book = engine.telemetry.book = book
            engine.telemetry.withdrawn_from = announced
        self._turn_to(first)
        return self.engine

    def _start_engine(self, name: str) -> Engine:
        given = dict(self.variant.case.config)
        config = EngineConfig(**{**given, "role": self.roles[name], "name": name})
        case = self.variant.case.model_copy(update={"config": config})
        variant = dataclasses.replace(self.variant, case=case)
        target = dataclasses.replace(self.target, role=None)
        engine = self._build(variant, target, self.memories[name])
        delivery = None if engine.connector is None else bool(engine.connector.requires_kv_delivery)
        self.trace.emit("pair.engine", on=name, role=self.roles[name], delivery=delivery)
        self.handovers.listen(engine)
        return engine

    def savers(self) -> list[PartMemory]:
        """What the engines computed that may save."""
        return [
            memory for name, memory in self.memories.items() if self.roles[name] != "kv_consumer"
        ]

    # -- steps -----------------------------------------------------------------------------------------------------------------
    def _turn_to(self, name: str) -> None:
        self.trace.on, self.engine = name, self.engines[name]

    def _params(self, add: Any) -> dict[str, Any] | None:
        if add.handed is None:
            return super()._params(add)
        return self.handovers.take(add.handed, self.trace.on or "", add)

    def _run_step(self, run: RunArgument) -> None:
        self.run_dry(run.max, until=run.until)

    def run_dry(self, limit: int | None = None, until: str | None = None) -> None:
        """Iterate all engines in turn, until nothing is left to do or request `until` finished."""
        here, idle, left = (
            self.trace.on or "",
            StallDetector(self.trace, self.target),
            limit or RUN_LIMIT,
        )
        while left:
            busy = [name for name, engine in self.engines.items() if engine.busy]
            if not busy or (until is not None and self._over(self.state.ids[until])):
                break
            before = self._progress()
            for name in busy:
                self._turn_to(name)
                self.engine.iterate()
            if self._progress() != before:
                idle.over()
                left -= 1
                continue
            left -= (
                limit is not None
            )  # steps without progress have a limit of their own: how many there are depends on the machine's speed
            if idle.stalled():
                self._stall(idle)
        if not left and limit is None:
            self._stall(idle)
        self._turn_to(here)

    def _over(self, req: str) -> bool:
        found = [
            request
            for engine in self.engines.values()
            if (request := engine.scheduler.requests.get(req)) is not None
        ]
        return not found or found[0].is_finished()

    def _progress(self) -> tuple[int, ...]:
        return tuple(
            value
            for engine in self.engines.values()
            for value in (engine.progress, len(engine.scheduler.requests))
        )

    # -- end -------------------------------------------------------------------------------------------------------------------
    def close(self, *, shut_down: bool, crashed: bool = False) -> None:
        """run.end of every engine, after all that happened; then the shutdowns."""
        if not crashed:
            self.handovers.end()
        gc.collect()
        ends = [
            self.trace.emit("run.end", on=name, **self._end_of(engine, crashed=crashed))
            for name, engine in self.engines.items()
        ]
        if shut_down:
            self.shutdown()
            for end in ends:  # a thread may live until the shutdown
                self.trace.amend(end, threads=self._threads())

    def shutdown(self) -> None:
        """Both connectors of every engine."""
        for name, engine in self.engines.items():
            self._turn_to(name)
            engine.shutdown()
