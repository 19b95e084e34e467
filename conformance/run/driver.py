# SPDX-License-Identifier: Apache-2.0
"""Driver of one engine through the steps of one case."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

from kvconform.compat.step import AnyText, build_request
from kvconform.compat.vllm_api import AWAITING_INPUT, RequestStatus
from kvconform.config.router import Checked
from kvconform.config.target import Target
from kvconform.contract.capabilities import tolerance
from kvconform.contract.case import Case, Variant
from kvconform.contract.events import lifecycle, run_end
from kvconform.contract.steps import (
    Add,
    Continue,
    Control,
    Damage,
    FailLoad,
    Idle,
    Killed,
    NewPart,
    OfPrompt,
    Otherwise,
    PartsPrompt,
    Reset,
    SamePrompt,
    Shutdown,
    Soak,
    Step,
)
from kvconform.contract.steps import Run as RunArgument
from kvconform.contract.trace import Event, Trace
from kvconform.engine.batch import FIRST_TOKEN, VOCABULARY, Info, Script
from kvconform.engine.configs import engine_id_of
from kvconform.engine.engine import Engine
from kvconform.engine.setup import build
from kvconform.kernels.codes import mix64
from kvconform.kv import device
from kvconform.kv.provenance import Adapter, Identity, Registry, text_id
from kvconform.process import alive, clock
from kvconform.run import dead_threads
from kvconform.run.controls import Controls
from kvconform.run.damage import Damager
from kvconform.run.expectations import Expectations, Reloads
from kvconform.run.forbidden import Forbidden
from kvconform.run.killer import Killer
from kvconform.run.leftovers import Leftovers, restarts_here
from kvconform.run.namesakes import Namesakes
from kvconform.run.promises import Promises
from kvconform.run.records import Progress, Reload, RunState, Snapshot
from kvconform.run.soak import soak
from kvconform.run.stall import StallDetector, give_time

PATIENCE = 12
"""How often a step is repeated in which the connector only answered lookups with None."""
PAUSES = (0.0, 0.0, 0.001, 0.004, 0.016, 0.06, 0.1)
"""Seconds to wait before each repetition; the last one repeats. A busy server needs some time."""
REST = 0.5
"""Seconds that a run with `rests` waits for what threads and processes are storing."""
ENDING = 2.0
"""Seconds that threads may take to end after a shutdown, on a machine that has much else to do."""
REST_STEPS = 6
"""Steps without work that it does in addition, as a connector may store when it is polled."""
MOST_STEPS = 2_000
"""Steps with progress after which a run without a limit has stalled: a load can repeat for ever."""
MOST_PER_REQUEST = 50
"""How many more of these steps each request may take."""
IMAGE_TOKEN = 7
"""Placeholder token of every image, as in a real tokenised prompt."""


class Watcher(Protocol):
    """Observer of a run. It may use the last engine further when the case's own steps are done.

    Events that it adds to the trace are not judged.
    """

    def started(self, engine: Engine) -> None:
        """React to a new engine, also after a restart."""

    def finished(self, driver: Driver) -> None:
        """React to the end of all steps, before the connector is shut down.

        Not called if the case itself shuts the connector down.
        """


class Driver:
    """Execution of a case's steps.

    Owns the engines of the run, one after the other: a restart builds a new one with the same
    store.
    """

    threads_stay: ClassVar[bool] = False
    """Whether threads of a run in this process were left behind."""

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
        changed: str | Otherwise | Killed | None = None,
        rests: bool = False,
    ) -> None:
        self.variant = variant
        self.running = variant.restarted(changed) if isinstance(changed, Otherwise) else variant
        """What the engine is built for: the variant, but for what a restart has changed."""
        self.target = target.restarted() if changed == "settings" else target
        self.trace = trace
        self.registry = registry
        self.seed = seed
        self.tmp = tmp
        self.relation = relation
        self.watcher = watcher
        self.state = RunState.resume(
            before, variant=self.running, trace=trace, caps=caps, promises=promises
        )
        self.router = Checked(target.router)
        self.damager = Damager(tmp, trace)
        self.controls = Controls(self.state)
        self.inputs = 0
        """How often a session got more input, or was ended."""
        self._threads_before = frozenset(threading.enumerate())
        self.rests = rests
        """Whether connectors get time to store, before stored content is asked for."""
        self._asked: tuple[int, int] | None = None
        self.expectations = Expectations(self.state, self._free_blocks)
        if self.running.sizes != variant.sizes:
            trace.emit("run.changed", **self.running.sizes)
        self.restarts = 0
        """Of the engine, in this process."""
        self.killer: Killer | None = None
        """Ends this process in the midst of a save."""
        self.leftovers: Leftovers | None = None
        if (count := restarts_here(variant.case.steps)) and self._counts_leftovers():
            self.leftovers = Leftovers(trace, count)
        self.engine = self._start()
        self._operations = self._table()

    def _table(self) -> Mapping[str, Callable[[Any], None]]:
        """Return the method for each kind of step (kvconform.contract.steps.STEPS)."""
        return {
            "add": self.add,
            "step": self._step,
            "run": self._run_step,
            "schedule": self._schedule,
            "land": self._land,
            "grammar": self._grammar,
            "abort": self._abort,
            "continue": self._continue,
            "preempt": self._preempt,
            "drop-local": self._drop_local,
            "reset": self._reset,
            "idle": self._idle,
            "restart": self._restart,
            "shutdown": self._shut_down,
            "fail-load": self._fail_load,
            "damage": self._damage,
            "control": self._control,
            "lookup-only": self._lookup_only,
            "reorder": self._reorder,
            "pause": lambda _: self.engine.pause(True),
            "resume": lambda _: self.engine.pause(False),
            "soak": self._soak,
            "expect": self.expectations.check,
        }

    # -- engines

    def _start(self) -> Engine:
        return self._build(self.running, self.target)

    def _build(self, variant: Variant, target: Target, memory: Any = None) -> Engine:
        """Build an engine and observe it. `memory` records what it computes."""
        state = self.state
        engine = build(
            variant,
            target,
            self.trace,
            self.registry,
            memory or state.memory,
            state.info,
            self.tmp,
            relation=self.relation,
        )
        reloads, forbidden = Reloads(state, engine.oracle.promised), Forbidden(state)
        namesakes = Namesakes(state)

        def looked_up(request: Any, event: Event) -> None:
            self.controls.looked_up(request, event)
            reloads.looked_up(request, event)
            forbidden.looked_up(request, event)
            namesakes.looked_up(request, event)

        engine.observer.on_lookup = looked_up
        if not variant.case.config.multi:  # its statistics are those of all its connectors
            engine.statistics.declared = state.caps["metrics"]
            engine.statistics.own_counters = getattr(engine.connector, "kvconform_counters", None)
            engine.statistics.seen.splits_tokens = variant.case.config.context_parallel > 1
            engine.statistics.seen.known = getattr(engine.connector, "kvconform_known", None)
            engine.statistics.seen.chunk_tokens = state.caps["chunk_tokens"]
        undisturbed = not takes_from_store(variant.case)
        for rank in engine.ranks.members:
            rank.cache.tolerance = max(tolerance(self._lossy()), state.tolerance)
            rank.cache.chunk_tokens = state.caps["chunk_tokens"] or variant.block_size
            rank.worker.oracle.undisturbed = undisturbed
        if self.watcher is not None:
            self.watcher.started(engine)
        return engine

    def _lossy(self) -> bool | float:
        """Return how far KV may be off: with other options, a connector may declare otherwise."""
        lossy: bool | float = self.state.caps["lossy"]
        if self.variant.case.changes_settings and self.target.connector is not None:
            lossy = self.target.declared(self.target.resolve()).get("lossy", lossy)
        return lossy

    # -- prompts

    def _tokens(self, name: str, count: int) -> list[int]:
        """Return fresh tokens of a request, a function of variant, seed and name.

        So a store that outlives its run knows none of the tokens of the next run.
        """
        base = text_id(f"{self.variant.id}/{self.seed}/{name}")
        return [FIRST_TOKEN + mix64(base + i) % VOCABULARY for i in range(count)]

    def _prompt(self, add: Add) -> list[int]:
        prompt = add.prompt
        state = self.state
        if isinstance(prompt, SamePrompt):
            return [token + prompt.above for token in state.prompts[prompt.same]]
        if isinstance(prompt, OfPrompt):
            known = list(state.prompts[prompt.of])
            if prompt.outputs:
                known = list(state.requests[prompt.of].all_token_ids)
            return known[: prompt.tokens] + self._tokens(add.req, prompt.then)
        if isinstance(prompt, PartsPrompt):
            return self._joined(add.req, prompt)
        return self._tokens(add.req, prompt)

    def _joined(self, name: str, prompt: PartsPrompt) -> list[int]:
        """Return the tokens of a prompt of parts; no two of its new parts are alike."""
        lengths = [part.new for part in prompt.parts if isinstance(part, NewPart)]
        fresh = iter(self._tokens(name, sum(lengths) + prompt.then))
        tokens: list[int] = []
        for part in prompt.parts:
            if isinstance(part, NewPart):
                tokens += islice(fresh, part.new)
            else:
                tokens += self.state.prompts[part.of][part.start : part.start + part.tokens]
        return tokens + list(fresh)

    # -- steps

    def execute_part(self, steps: Sequence[Step]) -> None:
        """Execute some steps of the case, run until nothing is left to do, and shut down."""
        self.execute_steps(steps)
        if self.killer is not None:
            self.killer.arm()
        self.run_dry()
        self._before_asking_again()
        dead_threads.emit()
        self.shutdown()

    def execute(self, steps: Sequence[Step]) -> None:
        """Execute the steps, run until nothing is left, check the expectations, and shut down."""
        self.execute_steps(steps)
        down = any(step.op == "shutdown" for step in self.variant.case.steps)
        if not down:
            self.run_dry()
            if self.watcher is not None:
                self.watcher.finished(self)
        for expectation in self.variant.case.expect:
            self.expectations.check(expectation)
        # A case that shuts down with work left ends like a crash.
        self.close(shut_down=not down, crashed=down and self.engine.busy)

    def execute_steps(self, steps: Sequence[Step]) -> None:
        """Execute some steps of the case, and nothing after them."""
        for step in steps:
            self._operations[step.op](step.arg)

    def add(self, add: Add) -> None:
        """Add a request, after the release of its id.

        The engine knows an ended request as long as the connector holds its blocks.
        """
        req_id = self._id_of(add)
        self._iterate_until(lambda: req_id not in self.engine.scheduler.requests)
        tokens = self._prompt(add)
        state = self.state
        generation = state.generations.get(req_id, -1) + 1
        state.generations[req_id] = generation
        items = [item.model_dump() for item in add.mm]
        lora = Adapter.of(**add.lora.model_dump()) if add.lora else None
        embeds = add.embeds.parts(len(tokens)) if add.embeds else []
        for _, start, end in embeds:
            tokens[start:end] = [0] * (end - start)  # vLLM's Request has zeros for its token ids
        _place(items, tokens)
        state.adds[add.req] = add
        state.prompts[add.req] = tokens
        state.ids[add.req] = req_id
        identity = Identity.of(add.salt, lora, items, embeds, self._other_model())
        state.identities[add.req] = identity
        state.infos[req_id] = Info(
            add.req,
            generation,
            identity,
            Script(list(add.drafts or []), add.stop_at, add.repeats_at),
        )
        if any((known := add.identity).values()):
            self.trace.emit("request.identity", req=req_id, generation=generation, **known)
        state.reloads.pop(req_id, None)
        if add.reloads:
            self._before_asking_again()
            state.reloads[req_id] = Reload(add.reloads)
        request = build_request(
            req_id,
            tokens,
            max_tokens=add.max_tokens,
            block_size=self.engine.variant.hash_size,
            stop=add.stop_at is not None,
            repeats=add.repeats_at is not None,
            salt=add.salt,
            lora=lora,
            items=items,
            embeds=embeds,
            priority=add.priority,
            params=self._params(add),
            skip_reading_prefix_cache=add.skip_reading_prefix_cache,
            structured=add.structured,
            session=add.session,
            pooling=self.running.case.config.pooling,
            arrival=float(len(state.adds)),
        )
        state.requests[add.req] = Snapshot(request)
        self.engine.add(request)

    def _id_of(self, add: Add) -> str:
        """Return the id that the engine has for a request that is added."""
        return add.id or add.req

    def _other_model(self) -> str | None:
        """Return a name for the model if a restart has changed it."""
        first, now = (each.case.config.weights for each in (self.variant, self.running))
        return " ".join(map(str, now)) if now != first else None

    def _params(self, add: Add) -> dict[str, Any] | None:
        """Return the kv_transfer_params of a request that is added."""
        handing_over = self._asking_for_transfer(add) if add.hand_over else {}
        forbidding = {self.state.caps["skip_save"]: True} if add.skip_save else {}
        own = {**add.params, **handing_over} or deepcopy(self.target.request_params)
        return {**own, **forbidding} or None

    def _asking_for_transfer(self, add: Add) -> dict[str, Any]:
        """Return the parameters with which the router asks that a request is handed over."""
        producer = engine_id_of(self.running, self.tmp)
        return self.router.prefill(self.state.ids[add.req], producer) or {}

    def _step(self, count: int) -> None:
        for _ in range(count):
            self._patiently(self.engine.iterate)

    def _schedule(self, count: int) -> None:
        for _ in range(count):
            self._patiently(self.engine.schedule)

    def _patiently(self, iterate: Callable[[], object]) -> None:
        """Repeat a step in which the connector only answered lookups with None, PATIENCE times."""
        for attempt in range(PATIENCE):
            if attempt:
                give_time(PAUSES[min(attempt, len(PAUSES)) - 1])
            before = len(self.trace.events)
            iterate()
            done = self.trace.events[before:]
            undecided = [e for e in done if e["kind"] == "lookup" and e["tokens"] is None]
            if not undecided or "req.scheduled" in [e["kind"] for e in done]:
                return
            if len(self.engine.queue) == 1:
                self.engine.land()

    def _run_step(self, run: RunArgument) -> None:
        self.run_dry(run.max, until=run.until, loaded=run.loaded)

    @property
    def all_engines(self) -> Sequence[Engine]:
        """The engines that are driven."""
        return list(self.named_engines.values())

    @property
    def named_engines(self) -> Mapping[str, Engine]:
        """The engines that are driven, by their names; a single one is called "".

        There is none if the one after a restart could not be built.
        """
        return {"": self.engine} if hasattr(self, "engine") else {}

    def run_dry(
        self, limit: int | None = None, until: str | None = None, loaded: str | None = None
    ) -> None:
        """Iterate until nothing is left to do, or `limit` is reached.

        Also until request `until` has finished, or `loaded` has loaded. `limit` and Stalled are as
        for `_iterate_until`.
        """

        def over() -> bool:
            ended = until is not None and self._ended(self.state.ids[until])
            ended = ended or (loaded is not None and self._loaded(self.state.ids[loaded]))
            return ended or not any(engine.busy for engine in self.all_engines)

        self._iterate_until(over, limit)

    def _loaded(self, req_id: str) -> bool:
        """Return whether an engine knows that a request's load is over, or runs the request."""
        schedulers = [engine.scheduler for engine in self.all_engines]
        known = any(req_id in each.finished_recving_kv_req_ids for each in schedulers)
        request = self.engine.scheduler.requests.get(req_id)
        return known or (request is not None and request.status == RequestStatus.RUNNING)

    def _ended(self, req_id: str) -> bool:
        """Return whether no engine has the request, or it has finished."""
        for engine in self.all_engines:
            request = engine.scheduler.requests.get(req_id)
            if request is not None:
                return bool(request.is_finished())
        return True

    def _iterate_until(self, over: Callable[[], bool], limit: int | None = None) -> None:
        """Iterate until `over()`, or until `limit` steps have made progress.

        The stall time limits steps without progress: how many of them there are depends on the
        machine's speed. Raises Stalled then, and if there is no end and no `limit` in spite of
        progress.
        """
        idle = StallDetector(self)
        requests = sum(len(engine.scheduler.requests) for engine in self.all_engines)
        left = limit or MOST_STEPS + MOST_PER_REQUEST * requests
        while left and not over():
            before = self._progress()
            self._iterate()
            if self._progress() != before:
                idle.over()
                left -= 1
                continue
            if idle.stalled():
                self._stall(idle)
        if not left and limit is None:
            self._stall(idle)

    def _iterate(self) -> None:
        """Do one iteration of every engine that has something to do."""
        self.engine.iterate()

    def _progress(self) -> list[tuple[int, int]]:
        """Return a value that changes when a step computes, loads or releases something."""
        engines = self.all_engines
        return [(engine.progress, len(engine.scheduler.requests)) for engine in engines]

    def _stall(self, idle: StallDetector) -> NoReturn:
        requests = self.engine.scheduler.requests.items()
        idle.give_up((req, request.status.name) for req, request in requests)

    def _land(self, count: int) -> None:
        for _ in range(count):
            if self.engine.queue:
                self.engine.land()

    def _grammar(self, name: str) -> None:
        request = self.engine.scheduler.requests[self.state.ids[name]]
        request.structured_output_request.grammar = AnyText()

    def _abort(self, name: str) -> None:
        self.engine.abort(self.state.ids[name])

    def _continue(self, more: Continue) -> None:
        """Give a session more input, or end it with the empty request that vLLM's client sends."""
        add, req_id = self.state.adds[more.req], self.state.ids[more.req]
        self.inputs += 1
        tokens = self._tokens(f"{more.req}/{self.inputs}", more.then) or [0]
        items = [item.model_dump() for item in more.mm]
        session = self.engine.scheduler.requests.get(req_id)
        if items:
            _place(items, tokens)
            self._iterate_until(lambda: self._ended(req_id) or session.status == AWAITING_INPUT)
            if self._ended(req_id):
                return  # by a bug of the engine
        request = build_request(
            req_id,
            tokens,
            max_tokens=more.max_tokens,
            block_size=self.engine.variant.hash_size,
            stop=False,
            salt=add.salt,
            lora=None,
            items=items,
            priority=add.priority,
            params=None,
            skip_reading_prefix_cache=False,
            session=more.then > 0,
            arrival=float(len(self.state.adds)),
        )
        self.engine.proceed(request)
        if items:
            self._now_has(session, more)

    def _now_has(self, session: Any, more: Continue) -> None:
        """Note the multi-modal items of a session's next input, at their places in its prompt."""
        state, req_id = self.state, self.state.ids[more.req]
        places = [each.mm_position.offset for each in session.mm_features[-len(more.mm) :]]
        found = zip(more.mm, places, strict=True)
        came = [item.model_copy(update={"at": place}) for item, place in found]
        add = state.adds[more.req]
        add = state.adds[more.req] = add.model_copy(update={"mm": [*add.mm, *came]})
        info = state.infos[req_id]
        info.identity = info.identity.and_items([item.model_dump() for item in came])
        state.identities[more.req] = info.identity
        generation = info.generation
        self.trace.emit("request.identity", req=req_id, generation=generation, **add.identity)

    def _preempt(self, name: str) -> None:
        # A victim with a step in flight is not preempted before that step has landed (R160).
        while not self.engine.preempt(self.state.ids[name]) and self.engine.queue:
            self.engine.land()

    def _drop_local(self, _: Any) -> None:
        self._before_asking_again()
        self.engine.reset(running=False, connector=False)

    def _before_asking_again(self) -> None:
        """Note whether connectors may be storing; with `rests`, let them, once per step.

        They get time if they have threads or processes, and steps without work, in which the engine
        polls them, unless that would go on with requests.
        """
        if self._now == self._asked:
            return
        device.current.catch_up()
        if alive.works_aside():
            self.state.hurried = self.state.works_aside = True
            if self.rests:
                time.sleep(REST)
        if self.rests:
            self._rest()
        self._asked = self._now

    def _rest(self) -> None:
        """Do steps without work, unless the engine has requests that have not ended."""
        if not self.engine.queue and not self.engine.scheduler.has_unfinished_requests():
            self.idle(REST_STEPS)

    @property
    def _now(self) -> tuple[int, int]:
        """The engine, and its step."""
        return id(self.engine), self.trace.step

    def _reset(self, reset: Reset) -> None:
        self.engine.reset(running=reset.running, connector=reset.connector)
        if reset.connector:
            self.state.reloads.clear()

    def idle(self, steps: int, seconds: float = 0) -> None:
        """Do steps without work, over which `seconds` pass on the virtual clock."""
        for _ in range(steps):
            if seconds:
                clock.advance(seconds / steps)
            self.engine.schedule()
            self.engine.land()

    def _idle(self, idle: Idle) -> None:
        if idle.seconds:
            self.trace.emit("clock.advanced", seconds=idle.seconds, why="idle")
        self.idle(idle.steps, idle.seconds)

    def _soak(self, argument: Soak) -> None:
        steps = self.variant.case.steps
        before = next(index for index, step in enumerate(steps) if step.arg is argument)
        soak(self, self._round(steps[:before]), argument)

    def _round(self, steps: Sequence[Step]) -> Sequence[Step]:
        """Return the steps of one round of `soak`."""
        return steps

    def settle(self, steps: int) -> None:
        """Iterate until nothing is left to do, then do steps without work on each engine."""
        self.run_dry()
        self.idle(steps)

    def _counts_leftovers(self) -> bool:
        """Return whether this process has the connector's halves, and only the driver has them."""
        apart = self.relation in ("no-connector", "second-process")
        return self.target.connector is not None and self.watcher is None and not apart

    def _restart(self, how: str) -> None:
        self.run_dry()
        self._before_asking_again()
        dead_threads.emit()
        self.shutdown()
        self.restarts += 1
        if how == "another-engine":
            self.running = self.running.named(f"{self.restarts + 1}")
        if self.leftovers is not None:
            self.leftovers.shut_down(self.engine)
            self._asked = None
            del self.engine
            self.leftovers.dropped()
        self.engine = self._start()
        self.trace.emit("engine.lifecycle", **lifecycle("restart"))

    def _shut_down(self, how: Shutdown) -> None:
        dead_threads.emit()
        self.shutdown()
        if how.again:
            self.engine.shutdown(again=True)

    def _fail_load(self, fail: FailLoad) -> None:
        if self.engine.connector is None:
            return
        req_id = self.state.ids[fail.req]
        positions = None if fail.positions == "all" else list(fail.positions)
        where = {} if fail.rank is None else {"rank": fail.rank}
        self.engine.connector.kvconform_fail_load(req_id, positions, **where)
        self.state.failing.add(req_id)
        for rank in self.engine.ranks.members:
            rank.worker.failing.add(req_id)

    def _damage(self, damage: Damage) -> None:
        if self.engine.connector is not None:
            self.damager.arm(damage, self.engine.probe)

    def _control(self, control: Control) -> None:
        """Ask the controller. What it has compressed is loaded with that tolerance from then on."""
        if self.engine.connector is None:
            return
        off = self.controls.apply(control, self._like(control.of), self.engine.connector)
        self.state.tolerance = max(self.state.tolerance, tolerance(off))
        for rank in self.engine.ranks.members:
            rank.cache.tolerance = max(rank.cache.tolerance, self.state.tolerance)

    def _like(self, name: str) -> Any:
        """Return a request that the engine does not know, whose prompt is all of another one."""
        add = self.state.adds[name]
        tokens = self.state.requests[name].all_token_ids
        return build_request(
            f"like {name}",
            tokens,
            max_tokens=1,
            block_size=self.engine.variant.hash_size,
            stop=False,
            salt=add.salt,
            lora=Adapter.of(**add.lora.model_dump()) if add.lora else None,
            items=[item.model_dump() for item in add.mm],
            embeds=add.embeds.parts(len(tokens)) if add.embeds else [],
            priority=add.priority,
            params=None,
            skip_reading_prefix_cache=False,
            arrival=float(len(self.state.adds)),
        )

    def _lookup_only(self, name: str) -> None:
        if self.engine.connector is not None:
            request = self.engine.scheduler.requests[self.state.ids[name]]
            self.engine.connector.get_num_new_matched_tokens(request, 0)

    def _reorder(self, _: Any) -> None:
        self.engine.scheduler.running.reverse()

    def _free_blocks(self) -> int:
        return int(self.engine.pool.get_num_free_blocks())

    # -- end

    def close(self, *, shut_down: bool, crashed: bool = False) -> None:
        """Emit run.end and, with `shut_down`, shut the connector down."""
        device.current.catch_up()
        self.state.works_aside = self.state.works_aside or alive.works_aside()
        dead_threads.emit()
        self._conclude_cache(sizes=True)
        if self.engine.ledger.leaked():
            gc.collect()  # the objects may be a cycle of garbage
        end = self.trace.emit("run.end", **self._end_of(self.engine, crashed=crashed))
        if shut_down:
            self.shutdown()
        self.trace.amend(end, threads=self.left_threads(crashed=crashed))

    def _conclude_cache(self, *, sizes: bool) -> None:
        """Emit the last state, and `sizes`, of the cache behind this engine's connector."""
        cache = self.engine.executor.cache
        if cache is not None and self.engine.busy:
            cache.release()
        elif cache is not None:
            cache.at_rest(self.target.stall_seconds)
            if sizes:
                cache.measure(self.target.stall_seconds)

    def _end_of(self, engine: Engine, *, crashed: bool) -> dict[str, Any]:
        """Return the fields of run.end for one engine."""
        known = sorted(engine.scheduler.requests)
        return run_end(
            quiesced=not engine.busy and not known,
            unfinished=known,
            free_blocks=engine.pool.get_num_free_blocks(),
            free_blocks_at_start=engine.blocks_at_start,
            request_objects_alive=engine.ledger.leaked(),
            threads=0,  # known after the shutdown
            crashed=crashed,
        )

    def live_threads(self) -> int:
        """Count the threads that were started since the run began."""
        return len(set(threading.enumerate()) - self._threads_before)

    def left_threads(self, *, crashed: bool) -> int:
        """Count the threads that are left after a shutdown, after a moment for those that end.

        Once threads have stayed, later runs of this process do not wait: their threads would stay,
        too, and a connector has hundreds of runs. A run that `crashed` does not wait, either,
        because its threads are not judged.
        """
        end = clock.monotonic() + ENDING
        while not (crashed or Driver.threads_stay) and self.live_threads():
            Driver.threads_stay = clock.monotonic() > end
            give_time(0.002)
        return self.live_threads()

    def may_work(self) -> bool:
        """Return whether connectors have threads, sockets or processes in this process."""
        return bool(alive.of_connectors())

    def shutdown(self) -> None:
        """Shut the connector down."""
        dead_threads.excuse()
        for engine in self.all_engines:
            engine.shutdown()


def _place(items: Sequence[Mapping[str, Any]], tokens: list[int]) -> None:
    """Put placeholders in the place of the tokens of multi-modal items."""
    for item in items:
        tokens[item["at"] : item["at"] + item["length"]] = [IMAGE_TOKEN] * item["length"]


def takes_from_store(case: Case) -> bool:
    """Return whether something in a case may take away what the connector has stored.

    In a MultiConnector, its siblings' loads may fail.
    """
    losses = ("fail-load", "damage", "reset", "restart", "shutdown")
    return bool(case.config.multi) or any(step.op in losses for step in case.steps)
