# SPDX-License-Identifier: Apache-2.0
"""Drives two engines through one case, in lock step: over one store, or a producer that hands its KV to a consumer."""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import Any

from kvconform.case import Config
from kvconform.driver import Driver
from kvconform.engines.engine import Engine
from kvconform.handover import Handovers
from kvconform.idle import Idle
from kvconform.memory import PartMemory
from kvconform.trace import Event, Place, Trace

RUN_LIMIT = 1_000


class PairTrace(Trace):
    """A trace whose events say which engine they are about: `on`, the one that is driven now unless the event says otherwise.

    Every engine counts its own steps.
    """

    def __init__(self) -> None:
        self.on: str | None = None
        self._steps: dict[str | None, int] = {}
        super().__init__()

    @property
    def step(self) -> int:  # type: ignore[override]
        """Steps of the engine that is driven now."""
        return self._steps.get(self.on, 0)

    @step.setter
    def step(self, value: int) -> None:
        self._steps[self.on] = value

    def emit(self, kind: str, /, **fields: Any) -> Event:
        """As Trace.emit."""
        return super().emit(kind, **({"on": self.on} if self.on is not None and "on" not in fields else {}), **fields)

    def place(self) -> Place:
        """As Trace.place, with the steps of every engine."""
        return len(self.events), dict(self._steps)

    def back_to(self, place: Place) -> None:
        """As Trace.back_to."""
        self._steps = dict(place[1])
        del self.events[place[0] :]


class EngineConfig(Config):
    """What one of several engines is built from: its role is its own, and its engine id ends with its name."""

    name: str

    @property
    def suffix(self) -> str:
        return f"-{self.name}"


class PairDriver(Driver):
    """Owns the engines of `config.engines`; `engine` is the one that steps are about."""

    engines: dict[str, Engine]
    trace: PairTrace

    def _start(self) -> Engine:
        roles: dict[str, str] = dict(self.variant.case.config.engines)
        self.roles, self.engines, self.memories = roles, {}, {n: PartMemory(self.memory) for n in roles}
        self.handovers = Handovers(self.trace, self)
        self.trace.emit("run.engines", engines=roles)
        for name in roles:
            self.trace.on = name
            self.engines[name] = self._start_engine(name)
        first = self.engines[next(iter(roles))]
        announced = [engine.watches[1].stored for engine in self.engines.values()]
        for engine in self.engines.values():
            engine.watches[0].book = engine.watches[1].book = first.watches[0].book
            engine.watches[1].withdrawn_from = announced
        self._do_on(next(iter(roles)))
        return self.engine

    def _start_engine(self, name: str) -> Engine:
        given = self.variant.case.config
        config = EngineConfig(**{**dict(given), "role": self.roles[name], "name": name})
        variant = dataclasses.replace(self.variant, case=self.variant.case.model_copy(update={"config": config}))
        target = dataclasses.replace(self.target, role=None)
        engine = Engine(variant, target, self.trace, self.registry, self.memories[name], self.info, self.tmp, relation=self.relation)
        self._observe(engine)
        delivery = None if engine.connector is None else bool(engine.connector.requires_kv_delivery)
        self.trace.emit("pair.engine", on=name, role=self.roles[name], delivery=delivery)
        self.handovers.listen(engine)
        return engine

    def savers(self) -> list[PartMemory]:
        """What the engines computed that may save."""
        return [memory for name, memory in self.memories.items() if self.roles[name] != "kv_consumer"]

    # -- steps -----------------------------------------------------------------------------------------------------------------
    def _do_on(self, name: str) -> None:
        self.trace.on, self.engine = name, self.engines[name]

    def _params(self, add: Any) -> dict[str, Any] | None:
        if add.handed is None:
            return super()._params(add)
        return self.handovers.take(add.handed, self.trace.on or "", add)

    def _do_run(self, run: Any) -> None:
        self._run(run.max, until=run.until)

    def _run(self, limit: int | None, until: str | None = None) -> None:
        """All engines in turn, until none has anything left to do, or that request has finished."""
        here, idle, left = self.trace.on or "", Idle(self.trace, self.target), limit or RUN_LIMIT
        while left:
            busy = [name for name, engine in self.engines.items() if engine.busy]
            if not busy or (until is not None and self._over(self.ids[until])):
                break
            before = self._progress()
            for name in busy:
                self._do_on(name)
                self.engine.iterate()
            if self._progress() != before:
                idle.over()
                left -= 1
                continue
            left -= limit is not None  # steps without progress have a limit of their own: how many there are depends on the machine's speed
            if idle.stalled():
                self._stall(idle)
        if not left and limit is None:
            self._stall(idle)
        self._do_on(here)

    def _over(self, req: str) -> bool:
        found = [request for engine in self.engines.values() if (request := engine.scheduler.requests.get(req)) is not None]
        return not found or found[0].is_finished()

    def _progress(self) -> tuple[int, ...]:
        return tuple(value for engine in self.engines.values() for value in (engine.progress, len(engine.scheduler.requests)))

    # -- end -------------------------------------------------------------------------------------------------------------------
    def close(self, *, shut_down: bool, crashed: bool = False) -> None:
        """run.end of every engine, after all that happened; then the shutdowns."""
        if not crashed:
            self.handovers.end()
        gc.collect()
        ends = []
        for name, engine in self.engines.items():
            live = sorted(engine.scheduler.requests)
            end = self.trace.emit(
                "run.end", on=name, quiesced=not engine.busy and not live, unfinished=live,
                free_blocks=engine.pool.get_num_free_blocks(), free_blocks_at_start=engine.blocks_at_start, engine_requests=live,
                request_objects_alive=engine.ledger.leaked(), threads=max(0, threading.active_count() - self.threads), crashed=crashed,
            )  # fmt: skip
            ends.append(end)
        if shut_down:
            self.shutdown()
            for end in ends:  # a thread may live until then
                end["threads"] = max(0, threading.active_count() - self.threads)

    def shutdown(self) -> None:
        """Both connectors of every engine."""
        for name, engine in self.engines.items():
            self._do_on(name)
            engine.shutdown()
