# SPDX-License-Identifier: Apache-2.0
"""One run of a variant: build it, drive it, and complete its trace."""

from __future__ import annotations

import atexit
import gc
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvconform.adapters import registry as adapters
from kvconform.compat import vllm_api
from kvconform.config.target import MultiTarget, Target, inside
from kvconform.contract.capabilities import complete
from kvconform.contract.case import LOADERS, Case, Device, Variant
from kvconform.contract.events import EVENTS, crash, lifecycle, run_cut_short, run_start
from kvconform.contract.steps import Killed, Otherwise
from kvconform.contract.trace import PairTrace, Trace
from kvconform.engine.configs import HEAD_DIM, HEADS, LAYERS
from kvconform.engine.fault import blame, is_connectors, refusal, within_a_connector
from kvconform.engine.halves import stand_ins
from kvconform.errors import KvconformError
from kvconform.judge.engine_bugs import lost, note_unfilled
from kvconform.kernels.codes import CodeBook
from kvconform.kv import gpu
from kvconform.kv.provenance import Registry
from kvconform.observe.inspector import shows_plans
from kvconform.observe.probe import Patch, Probe
from kvconform.pack import stand_in
from kvconform.process import clock
from kvconform.process.servers import clear_all
from kvconform.process.watchdog import HookTimeout
from kvconform.run import dead_threads
from kvconform.run.driver import Driver, Watcher
from kvconform.run.isolation import (
    FirstPart,
    FirstPartEnded,
    cannot_fork,
    process_restart,
    run_elsewhere,
    run_first_part,
    run_first_part_afresh,
)
from kvconform.run.pair import PairDriver
from kvconform.run.promises import Promises
from kvconform.run.records import Progress, Run
from kvconform.run.stall import Stalled

BOOK = CodeBook(LAYERS, HEADS, HEAD_DIM)
_MAY_NAME_FILES = {"error", "error_text", "value", "detail", "pickle_error"}
_TEXTS = {
    kind.name: names for kind in EVENTS.values() if (names := _MAY_NAME_FILES & kind.fields.keys())
}
"""Fields that may contain a path, by kind of event."""
_SHORT = frozenset({"None", "True", "False"})
"""Values that most hooks return, as text."""
GARBAGE = 20_000
"""Threshold of Python's garbage collector, in new containers.

With Python's own, 700, collection takes a twentieth of a run. A run that seems to leak collects in
any case.
"""
_frozen = False


def run_variant(
    variant: Variant,
    target: Target,
    *,
    seed: int,
    tmp: Path,
    relation: str = "connector",
    caps: dict[str, Any] | None = None,
    promises: Promises | None = None,
    book: CodeBook = BOOK,
    watcher: Watcher | None = None,
    may_fork: bool = False,
    afresh: bool = False,
    first_part: FirstPart | None = None,
    rests: bool = False,
) -> Run:
    """Make one run of a variant. Writes only below `tmp`.

    `relation` says how the run differs from the one with relation `connector`: for example
    `no-connector`, `pickled-metadata` or `repeat`. With `may_fork` a run that forks does so in this
    process; without, it gets a fresh interpreter if connectors have left threads here, and with
    `afresh` in any case. With `first_part`, the run ends at the restart of the case, and leaves
    there what the rest needs. With `rests`, connectors get time to store.
    """
    _freeze()
    # A calibration runs inside another run, whose store must keep its content.
    if Probe.active is None:
        clear_all()
    if relation == "hash-seed":
        return run_elsewhere(variant, target, seed=seed, tmp=tmp, caps=caps, rests=rests)
    stays_here = may_fork or watcher is not None or relation == "no-connector"
    forks = target.device != "cuda"  # see `_before_restart`
    if afresh or (forks and not stays_here and cannot_fork(variant.case.steps, relation)):
        return run_elsewhere(
            variant,
            target,
            seed=seed,
            tmp=tmp,
            caps=caps,
            relation=relation,
            promises=promises,
            rests=rests,
        )
    multi = variant.case.config.multi
    if relation == "inside-multi" or (multi and relation not in ("no-connector", "alone")):
        target = inside(target, multi or ["self"])
    with_connector = relation != "no-connector" and target.connector is not None
    caps = caps if caps is not None else complete(dict(target.capabilities))
    settings = variant.case.config
    count = len(settings.layer_numbers)
    if settings.layers or count > book.layers:
        book = CodeBook(count, book.heads, book.head_dim)
    # A run without a connector needs no device: the order of work on it concerns connectors only.
    kind: Device = target.device if with_connector else "cpu"
    slow = variant.slow if kind != "cpu" else None
    policies = [*variant.case.policies]
    if not LOADERS.isdisjoint(settings.multi):
        policies.append("sibling-loads")
    trace = PairTrace() if settings.engines else Trace()
    start = run_start(
        seed=seed,
        engine=variant.engine,
        case=variant.case.id,
        scheduling=variant.scheduling,
        runner=variant.runner,
        depth=variant.depth,
        vllm=vllm_api.VLLM_VERSION,
        **variant.sizes,
        policies=policies,
        connector=target.connector if with_connector else None,
        spec_tokens=settings.spec_tokens,
        role=target.role or settings.role,
        failure_policy=settings.load_failure_policy,
        groups=max(1, len(settings.groups)),
        stages=variant.case.stages,
        context_ranks=max(variant.case.context_degrees),
        drafter=settings.drafter,
        pooling=settings.pooling,
        device=kind,
        slow=slow,
    )
    trace.emit("run.start", **start)
    channels = _channels(target) if with_connector else frozenset({"sched", "kv"})
    run = Run(variant, relation, trace.events, caps, channels)
    tmp.mkdir(parents=True, exist_ok=True)
    create = partial(
        PairDriver if settings.engines else Driver,
        variant,
        target,
        trace,
        seed=seed,
        tmp=tmp,
        relation=relation,
        caps=caps,
        rests=rests,
    )
    if with_connector:
        adapters.install(target.adapters)  # before the connector is imported
        siblings = target.siblings() if isinstance(target, MultiTarget) else []
        with (
            Patch(target.resolve(), *stand_ins(target, relation), *siblings),
            gpu.opened(kind, slow, late=variant.case.late_threads) as where,
            adapters.in_force(target.adapters),  # inside: their end uses the device
            dead_threads.noticed(trace, target.resolve()),
        ):
            create = partial(create, promises=promises)
            _drive(run, create, trace, Registry(book), watcher, first_part)
            run.lacks = run.lacks or where.lacks
    else:
        _drive(run, partial(create, promises=None), trace, Registry(book), None, first_part)
    _scrub(trace, str(tmp))
    return run


def _channels(target: Target) -> frozenset[str]:
    channels = {"hooks", "sched"}
    if target.half != "scheduler":
        channels.add("kv")
        if target.device == "emulated":
            channels.add("device")
    return frozenset(channels)


@clock.of_run()
def _drive(
    run: Run,
    create: partial[Driver],
    trace: Trace,
    registry: Registry,
    watcher: Watcher | None = None,
    first_part: FirstPart | None = None,
) -> None:
    """Create the driver and execute the case; `create` lacks only what differs between parts.

    With `first_part`, execute the steps before the restart only.
    """
    driver = None
    outer = Probe.active  # of the run that a calibration runs inside
    case = run.variant.case
    rest = list(case.steps)
    before = None
    try:
        changed = None
        if split := process_restart(rest):
            changed = rest[split].arg
            first = rest[:split]
            rest = rest[split + 1 :]
            if first_part is not None:
                driver = create(registry=registry)
                driver.execute_part(first)
                first_part.left = driver.state.progress, driver.registry
                return
            before, registry = _before_restart(run, create, changed, first, trace, registry)
        driver = create(registry=registry, before=before, watcher=watcher, changed=changed)
        driver.execute(rest)
        run.unmet = driver.expectations.unmet(case.provokes)
        run.lacks = driver.damager.lacks
    except KvconformError:
        raise
    except FirstPartEnded as ended:
        run.harness_error, run.lacks = ended.harness_error, ended.lacks
    except (Exception, HookTimeout, SystemExit) as error:
        # An error of the connector or the engine is a finding; `_culprit` separates ours from them.
        _conclude(run, trace, driver, error, restarted=before is not None)
    finally:
        if driver is not None:
            driver.damager.until_end.close()
        note_unfilled(trace)
        if driver is not None:
            run.hurried, run.works_aside = driver.state.hurried, driver.state.works_aside
        engines = driver.all_engines if driver is not None else ()
        if any(shows_plans(engine.inspector) for engine in engines):
            run.channels |= {"plan"}
        if any(engine.executor.cache is not None for engine in engines):
            run.channels |= {"cache"}
        Probe.active = outer


def _starts_with_an_error(trace: Trace) -> bool:
    """Return whether the construction of a half ended with an error."""
    starts = [e for e in trace.events if e["kind"] == "engine.lifecycle" and e["op"] == "start"]
    return bool(starts) and starts[-1]["error"] is not None


def _before_restart(
    run: Run,
    create: partial[Driver],
    kind: str | Otherwise | Killed,
    steps: Sequence[Any],
    trace: Trace,
    registry: Registry,
) -> tuple[Progress, Registry]:
    """Run the steps before a restart in another process, of this `kind`; complete the trace.

    A forked process could not use a CUDA device that this one has opened.
    """
    variant, target, _ = create.args
    reseeded = kind == "interpreter"
    if (reseeded or target.device == "cuda") and run.relation != "no-connector":
        known = {
            name: create.keywords[name]
            for name in ("seed", "tmp", "relation", "caps", "promises", "rests")
        }
        return run_first_part_afresh(variant, target, trace, reseeded=reseeded, **known)
    return run_first_part(
        partial(create, registry=registry),
        steps,
        trace,
        lambda dead, error: _conclude(run, trace, dead, error, restarted=False),
        create.keywords["tmp"],
        kind.killed_at if isinstance(kind, Killed) else None,
    )


_REFUSABLE = (
    "groups",
    "layout",
    "kernel_block_size",
    "narrow_layer",
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "dtype",
    "cache_dtype",
    "layers",
    "drafter",
    "spec_tokens",
    "prefix_caching",
    "load_failure_policy",
    "multi",
)
"""Settings that a connector may refuse at its start, in a sentence: it does not support them."""


def settings_of(case: Case, *, restarted: bool) -> str:
    """Return the settings of a case that a connector may refuse, in words; "" if it has none.

    After a restart, all that it changes counts: the store has KV of the engine before it.
    """
    config = case.config.model_dump(exclude_defaults=True)
    asked = {name: config[name] for name in _REFUSABLE if name in config}
    for each in case.changes if restarted else ():
        asked |= each.model_dump(exclude_none=True)
    if restarted and case.changes_settings:
        asked["other options"] = "over the same store"
    found = [f"{name} {value}" for name, value in asked.items()]
    for engine, own in case.config.unlike.items():
        found += [f"{name} {value} of engine {engine}" for name, value in own.items()]
    return ", ".join(found)


def _scrub(trace: Trace, tmp: str) -> None:
    """Replace the run's own directory in texts, so that equal runs have equal traces."""
    for event in trace.events:
        kind = event["kind"]
        if kind not in _TEXTS:
            continue
        if kind == "hook.returned" and event["error"] is None and event["value"] in _SHORT:
            continue
        for name in _TEXTS[kind]:
            text = event.get(name)
            if isinstance(text, str) and tmp in text:
                trace.amend(event, **{name: text.replace(tmp, "{tmp}")})


def _conclude(
    run: Run, trace: Trace, driver: Driver | None, error: BaseException, *, restarted: bool
) -> FirstPartEnded:
    """Complete the trace of a run that stalled or crashed, and say in the run what was at fault.

    `restarted`: whether it was the engine after a restart in another process.
    Returns the same for a run that ended before its restart.
    """
    if (stood_in := stand_in.used(error)) is not None:
        run.lacks = str(stood_in)
    elif driver is None and (asked := settings_of(run.variant.case, restarted=restarted)):
        sentence = refusal(error)
        if is_connectors(error) and _starts_with_an_error(trace):
            trace.emit("start.refused", asked=asked, sentence=sentence)
        if sentence:
            run.lacks = f"the connector refuses {asked}: {sentence}"
    try:
        if not isinstance(error, Stalled):
            _crashed(run, trace, driver, error)
        elif driver is not None:
            driver.close(shut_down=True, crashed=False)
    except (Exception, HookTimeout, SystemExit) as late:
        # Closing a stalled run shuts the connector down, which may raise, too.
        _crashed(run, trace, driver, late)
    return FirstPartEnded(run.harness_error, run.lacks)


def _crashed(run: Run, trace: Trace, driver: Driver | None, error: BaseException) -> None:
    """Emit the end of a run that crashed, and shut the connector down.

    Sets the traceback of the run and, if the harness is at fault, its error.
    """
    note_unfilled(trace)
    dead_threads.emit()
    where, hook = _culprit(trace, driver, error)
    trace.emit("engine.crash", **crash(where, error, hook))
    run.traceback = "".join(traceback.format_exception(error))[-6000:]
    if where == "harness":
        run.harness_error = "".join(traceback.format_exception(error))[-3000:]
    # A shutdown that raises comes after run.end.
    if not any(e["kind"] == "run.end" for e in trace.events):
        if isinstance(trace, PairTrace):
            trace.on = None  # the end of all engines
        trace.emit("run.end", **run_cut_short())
    if driver is not None and not isinstance(error, HookTimeout):
        try:
            driver.shutdown()
        except (Exception, HookTimeout, SystemExit) as late:
            # The run is over; an error of the shutdown after a crash is only recorded.
            trace.emit("engine.lifecycle", **lifecycle("shutdown", error=late))


def _culprit(trace: Trace, driver: Driver | None, error: BaseException) -> tuple[str, str | None]:
    """Return where an error came from ("hook", "engine" or "harness"), and the name of the hook."""
    where = blame(error)
    if where == "harness" and lost(trace.events):
        where = "engine"  # the engine asked for the impossible
    probe = Probe.active
    last = probe.last_error if probe is not None else None
    if last is not None:
        name, raised = last
        if raised is error or raised is error.__cause__ or raised is error.__context__:
            return "hook", name
    if driver is None and (where != "harness" or _refuses(error)):
        return "hook", "__init__"
    if any(
        e["kind"] == "hook.returned" and (e["mutated_args"] or not e["value_ok"])
        for e in trace.events
    ):
        return "engine", None  # an engine need not cope with an illegal value
    return where, None


def _refuses(error: BaseException) -> bool:
    """Return whether a connector, also one of the suite's own, refuses to be constructed."""
    return within_a_connector(error) and refusal(error) is not None


def _freeze() -> None:
    """Exclude the objects of imported modules from garbage collection, once per process.

    A run that seems to leak collects, and importing vLLM creates many objects, hardly any of which
    are garbage: a collection before would take a third of a second to find some hundred.
    """
    global _frozen
    if not _frozen:
        gc.freeze()
        gc.set_threshold(GARBAGE)
        atexit.register(gc.unfreeze)  # extension modules report what is left at exit as leaks
        _frozen = True
