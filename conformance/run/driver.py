# SPDX-License-Identifier: Apache-2.0
"""Drives one engine through the steps of one case.

Steps without progress: when they are a stall, and which of them stay in its trace.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from kvconform.compat.step import AnyText, build_request
from kvconform.config.target import Target
from kvconform.contract.capabilities import tolerance
from kvconform.contract.case import Variant
from kvconform.contract.events import run_end
from kvconform.contract.scenario import HAND_OVER
from kvconform.contract.steps import OfPrompt, SamePrompt
from kvconform.contract.trace import Event, Place, Trace
from kvconform.engine.batch import FIRST_TOKEN, VOCABULARY, Info, Script
from kvconform.engine.engine import Engine
from kvconform.kernels.codes import mix64
from kvconform.kv.provenance import Identity, Registry, text_id
from kvconform.run.expectations import Expectations, Reloads
from kvconform.run.promises import Promises
from kvconform.run.records import Progress, Snapshot

STALL_STEPS = 60
COUNTERS = frozenset({"seq", "step", "called_seq", "of_step", "digest"})
"""Fields that go up from step to step although nothing happens; metadata may hold such a number, too."""
PERIODS = 4
"""Steps after which a connector may say the same again: one that takes turns asks one request in one step, another in the next."""


class Idle:
    """The steps since there was progress. A connector may work in threads or in a server, so they are a stall only when they have taken the
    target's stall time; how many there are then depends on the machine's speed, which the trace must not."""

    def __init__(self, trace: Trace, target: Target) -> None:
        self.trace, self.target = trace, target
        self.over()

    def over(self) -> None:
        """There was progress: count anew."""
        self.since, self.ends = time.monotonic(), list[Place]()

    def stalled(self) -> bool:
        """One more step is done: whether that makes a stall. Waits a little if there were many."""
        self.ends.append(self.trace.place())
        if len(self.ends) < STALL_STEPS:
            return False
        if self.target.half != "both" or time.monotonic() - self.since > self.target.stall_seconds:
            return True
        time.sleep(0.002)
        return False

    def forget(self) -> None:
        """Cut the steps after STALL_STEPS off the trace, if each of them says what that one said, or they do so in turns of up to PERIODS.
        The run must not go on: who watches it does not count back."""
        if any(map(self._repeats, range(1, PERIODS + 1))):
            self.trace.back_to(self.ends[STALL_STEPS - 1])

    def _repeats(self, period: int) -> bool:
        ends = self.ends[STALL_STEPS - period - 1 :]
        steps = [self.trace.events[a:b] for (a, _), (b, _) in itertools.pairwise(ends)]
        if any(
            event.get("error") for step in steps[:period] for event in step
        ):  # a crash at the shutdown may name the latest error
            return False
        return len(steps) >= period and all(
            _alike(one, other) for one, other in zip(steps, steps[period:], strict=False)
        )


def _alike(one: list[Event], other: list[Event]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys()
        and all(value == b[name] for name, value in a.items() if name not in COUNTERS)
        for a, b in zip(one, other, strict=True)
    )


PATIENCE = 8
RUN_LIMIT = 20_000


class Stalled(Exception):
    """No progress for STALL_STEPS steps and the target's stall time."""


class Watcher(Protocol):
    """Looks on, and may do more with the last engine when the case's own steps are done. What it adds to the trace is not judged."""

    def started(self, engine: Engine) -> None:
        """An engine begins, also after a restart."""

    def finished(self, driver: Driver) -> None:
        """All is done and has landed; the connector is about to be shut down. Not called where the case itself does that."""


class Driver:
    """Executes a case's steps. Owns the run's engines one after the other (a restart makes a new one over the same store)."""

    def __init__(
        self,
        variant: Variant,
        target: Target,
        trace: Trace,
        registry: Registry,
        *,
        seed: int,
        tmp: Path,
        relation: str,
        caps: dict[str, Any],
        promises: Promises | None,
        before: Progress | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.watcher = watcher
        self.variant, self.target, self.trace, self.registry = variant, target, trace, registry
        self.seed, self.tmp, self.relation = seed, tmp, relation
        self.caps, self.promises = caps, promises
        progress = before or Progress()
        self.memory, self.infos, self.adds, self.prompts = (
            progress.memory,
            progress.infos,
            progress.adds,
            progress.prompts,
        )
        self.ids, self.requests = progress.ids, progress.requests
        self._generations, self.reloads = progress.generations, progress.reloads
        self.progress = progress
        self.failing: set[str] = set()  # ids of requests whose load was made to fail
        self.threads = threading.active_count()
        self.engine = self._start()
        self.expectations = Expectations(self)

    def _start(self) -> Engine:
        engine = Engine(
            self.variant,
            self.target,
            self.trace,
            self.registry,
            self.memory,
            self.info,
            self.tmp,
            relation=self.relation,
        )
        self._observe(engine)
        return engine

    def _observe(self, engine: Engine) -> None:
        """Be told of an engine's lookups, and let its readers know what the connector may lose."""
        engine.observer.on_lookup = Reloads(self).looked_up
        for oracle in (engine.observer.oracle, *engine.observer.others):
            oracle.cache.tolerance = tolerance(self.caps["lossy"])
        if self.watcher is not None:
            self.watcher.started(engine)

    def info(self, req_id: str) -> Info:
        """What the harness knows about the live incarnation of a request id."""
        return self.infos[req_id]

    # -- prompts ---------------------------------------------------------------------------------------------------------------
    def _tokens(self, name: str, count: int) -> list[int]:
        """Fresh tokens of a request: a function of variant, seed and name, so a store that outlives its run knows none of the next's."""
        base = text_id(f"{self.variant.id}/{self.seed}/{name}")
        return [FIRST_TOKEN + mix64(base + i) % VOCABULARY for i in range(count)]

    def _prompt(self, add: Any) -> list[int]:
        prompt = add.prompt
        if isinstance(prompt, SamePrompt):
            return list(self.prompts[prompt.same])
        if isinstance(prompt, OfPrompt):
            known = list(self.prompts[prompt.of])
            if prompt.outputs:
                known = list(self.requests[prompt.of].all_token_ids)
            return known[: prompt.tokens] + self._tokens(add.req, prompt.then)
        return self._tokens(add.req, prompt)

    # -- steps -----------------------------------------------------------------------------------------------------------------
    def execute_part(self, steps: Sequence[Any]) -> None:
        """Some steps of the case; then everything that is in flight lands and the connector is shut down."""
        for step in steps:
            getattr(self, "_do_" + step.op.replace("-", "_"))(step.arg)
        self._run(None)
        self.engine.shutdown()

    def execute(self, steps: Sequence[Any]) -> None:
        """The steps, then whatever is left to run, then the case's expectations and the shutdown."""
        for step in steps:
            getattr(self, "_do_" + step.op.replace("-", "_"))(step.arg)
        down = any(s.op == "shutdown" for s in self.variant.case.steps)
        if not down:
            self._run(None)
            if self.watcher is not None:
                self.watcher.finished(self)
        self.expectations.at_end(self.variant.case.expect)
        self.close(
            shut_down=not down, crashed=down and self.engine.busy
        )  # shut down with work left: what was to come did not

    def _do_add(self, add: Any) -> None:
        tokens = self._prompt(add)
        req_id = add.id or add.req
        generation = self._generations.get(req_id, -1) + 1
        self._generations[req_id] = generation
        items = [m.model_dump() for m in add.mm]
        for (
            item
        ) in items:  # every image has the same placeholder token, as in a real tokenised prompt
            tokens[item["at"] : item["at"] + item["length"]] = [7] * item["length"]
        self.adds[add.req], self.prompts[add.req], self.ids[add.req] = add, tokens, req_id
        self.infos[req_id] = Info(
            add.req,
            generation,
            Identity.of(add.salt, add.lora, items),
            Script(list(add.drafts or []), add.stop_at),
        )
        if add.reloads:
            self.reloads[req_id] = add.reloads
        request = build_request(
            req_id,
            tokens,
            max_tokens=add.max_tokens,
            block_size=self.variant.block_size,
            stop=add.stop_at is not None,
            salt=add.salt,
            lora=add.lora,
            items=items,
            priority=add.priority,
            params=self._params(add),
            skip_reading_prefix_cache=add.skip_reading_prefix_cache,
            structured=add.structured,
            arrival=float(len(self.adds)),
        )
        self.requests[add.req] = Snapshot(request)
        self.engine.add(request)

    def _params(self, add: Any) -> dict[str, Any] | None:
        """kv_transfer_params of a request that is added."""
        return {**(HAND_OVER if add.hand_over else {}), **add.params} or None

    def _do_step(self, count: int) -> None:
        for _ in range(count):
            self._patiently(self.engine.iterate)

    def _patiently(self, iterate: Callable[[], object]) -> None:
        """A step in which nothing happens but lookups without an answer is not one that the case counts on: it is done again."""
        for _ in range(PATIENCE):
            before = len(self.trace.events)
            iterate()
            done = self.trace.events[before:]
            if not any(e["kind"] == "lookup" and e["tokens"] is None for e in done) or any(
                e["kind"] == "req.scheduled" for e in done
            ):
                return
            if len(self.engine.queue) == 1:
                self.engine.land()

    def _do_run(self, run: Any) -> None:
        self._run(run.max)

    def _run(self, limit: int | None) -> None:
        idle, progress = Idle(self.trace, self.target), self.engine.progress
        left = 2_000 + 50 * len(
            self.engine.scheduler.requests
        )  # steps with progress: a load can be repeated without end
        for _ in range(limit or RUN_LIMIT):
            if not self.engine.busy:
                return
            self.engine.iterate()
            if self.engine.progress != progress:
                idle.over()
                progress, left = self.engine.progress, left - 1
                if not left:
                    break
            elif idle.stalled():
                self._stall(idle)
        if limit is None or not left:
            self._stall(idle)

    def _stall(self, idle: Idle) -> NoReturn:
        idle.forget()
        waiting = [
            f"{r}: {q.status.name}" for r, q in sorted(self.engine.scheduler.requests.items())
        ]
        self.trace.emit("engine.stall", steps=STALL_STEPS, waiting_on=waiting, seconds=0)
        raise Stalled

    def _do_schedule(self, count: int) -> None:
        for _ in range(count):
            self._patiently(self.engine.schedule)

    def _do_land(self, count: int) -> None:
        for _ in range(count):
            if self.engine.queue:
                self.engine.land()

    def _do_grammar(self, name: str) -> None:
        self.engine.scheduler.requests[self.ids[name]].structured_output_request.grammar = AnyText()

    def _do_abort(self, name: str) -> None:
        self.engine.abort(self.ids[name])

    def _do_preempt(self, name: str) -> None:
        while not self.engine.preempt(self.ids[name]) and self.engine.queue:
            self.engine.land()  # a victim with a step in flight is not preempted before that step has landed (R160)

    def _do_drop_local(self, _: Any) -> None:
        self.engine.reset(running=False, connector=False)

    def _do_reset(self, reset: Any) -> None:
        self.engine.reset(running=reset.running, connector=reset.connector)
        if reset.connector:
            self.reloads.clear()

    def _do_idle(self, count: int) -> None:
        for _ in range(count):
            self.engine.schedule()
            self.engine.land()

    def _do_restart(self, _: str) -> None:
        self._run(None)
        self.engine.shutdown()
        self.engine = self._start()
        self.trace.emit("engine.lifecycle", op="restart", pid=0, error=None)

    def _do_shutdown(self, _: Any) -> None:
        self.engine.shutdown()
        self.engine.shutdown(again=True)

    def _do_fail_load(self, fail: Any) -> None:
        positions = None if fail.positions == "all" else list(fail.positions)
        if self.engine.connector is not None:
            self.engine.connector.kvconform_fail_load(self.ids[fail.req], positions)
            self.failing.add(self.ids[fail.req])

    def _do_lookup_only(self, name: str) -> None:
        if self.engine.connector is None:
            return
        request = self.engine.scheduler.requests[self.ids[name]]
        self.engine.connector.get_num_new_matched_tokens(request, 0)

    def _do_reorder(self, _: Any) -> None:
        self.engine.scheduler.running.reverse()

    def _do_pause(self, _: Any) -> None:
        self.engine.pause(True)

    def _do_resume(self, _: Any) -> None:
        self.engine.pause(False)

    def _do_expect(self, expectation: Any) -> None:
        self.expectations.check(expectation)

    # -- end -------------------------------------------------------------------------------------------------------------------
    def close(self, *, shut_down: bool, crashed: bool = False) -> None:
        """Emit run.end and, unless it happened already, shut the connector down."""
        if self.engine.ledger.leaked():  # perhaps only a cycle of garbage
            gc.collect()
        end = self.trace.emit("run.end", **self._end_of(self.engine, crashed=crashed))
        if shut_down:
            self.shutdown()
            self.trace.amend(end, threads=self._threads())  # a thread may live until the shutdown

    def _end_of(self, engine: Engine, *, crashed: bool) -> dict[str, Any]:
        """The fields of run.end for one engine."""
        known = sorted(engine.scheduler.requests)
        return run_end(
            quiesced=not engine.busy and not known,
            unfinished=known,
            free_blocks=engine.pool.get_num_free_blocks(),
            free_blocks_at_start=engine.blocks_at_start,
            request_objects_alive=engine.ledger.leaked(),
            threads=self._threads(),
            crashed=crashed,
        )

    def _threads(self) -> int:
        """Threads that were not there when the run began."""
        return max(0, threading.active_count() - self.threads)

    def shutdown(self) -> None:
        """Shut the connector down."""
        self.engine.shutdown()
