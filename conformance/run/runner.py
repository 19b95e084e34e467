# SPDX-License-Identifier: Apache-2.0
"""Runs one variant of a case and returns its trace; and runs all that judging it takes."""

from __future__ import annotations

import atexit
import gc
import traceback
from pathlib import Path
from typing import Any

from kvconform.adapters import registry as adapters
from kvconform.compat import vllm_api
from kvconform.config.target import Target, inside
from kvconform.contract.capabilities import complete
from kvconform.contract.case import Device, Variant
from kvconform.contract.events import EVENTS, run_cut_short, run_start
from kvconform.contract.trace import PairTrace, Trace
from kvconform.engine.configs import HEAD_DIM, HEADS, LAYERS
from kvconform.engine.fault import _blame
from kvconform.engine.halves import stand_ins
from kvconform.errors import KvconformError, one_line
from kvconform.judge.engine_bugs import lost, note_unfilled
from kvconform.kernels.codes import CodeBook
from kvconform.kv import gpu
from kvconform.kv.provenance import Registry
from kvconform.observe.probe import Patch, Probe
from kvconform.process.servers import clear_all
from kvconform.process.watchdog import HookTimeout
from kvconform.run.driver import Driver, Stalled, Watcher
from kvconform.run.isolation import (
    FirstPartEnded,
    cannot_fork,
    process_restart,
    run_elsewhere,
    run_first_part,
)
from kvconform.run.pair import PairDriver
from kvconform.run.promises import Promises
from kvconform.run.records import Run

BOOK = CodeBook(LAYERS, HEADS, HEAD_DIM)
_MAY_NAME_FILES = {"error", "error_text", "value", "detail", "pickle_error"}
_TEXTS = {
    kind.name: names for kind in EVENTS.values() if (names := _MAY_NAME_FILES & kind.fields.keys())
}
"""Fields that may have a path in them, by kind of event."""
_SHORT = frozenset({"None", "True", "False"})
"""What most hooks return."""
GARBAGE = 20_000
"""New containers after which Python looks for cycles: with its own 700, that takes a twentieth of a run. A run that seems to leak looks
anyhow."""
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
) -> Run:
    """One run. `relation` says how it differs from the plain one: `no-connector`, `pickled-metadata`, `repeat`. Writes below `tmp` only.

    `may_fork`: a run that forks does so here, whatever threads there are; else it takes a fresh interpreter where connectors left some.
    """
    _freeze()
    if (
        Probe.active is None
    ):  # a calibration runs inside another run, whose store is not to be emptied
        clear_all()
    if relation == "hash-seed":
        return run_elsewhere(variant, target, seed=seed, tmp=tmp, caps=caps)
    if (
        not may_fork
        and watcher is None
        and relation != "no-connector"
        and cannot_fork(variant.case.steps, relation)
    ):
        return run_elsewhere(
            variant, target, seed=seed, tmp=tmp, caps=caps, relation=relation, promises=promises
        )
    if relation == "inside-multi" or (
        variant.case.config.multi and relation not in ("no-connector", "alone")
    ):
        target = inside(target, variant.case.config.multi or ["self"])
    with_connector = relation != "no-connector" and target.connector is not None
    caps = caps if caps is not None else complete(dict(target.capabilities))
    settings = variant.case.config
    if len(settings.groups) > book.layers:  # one layer each
        book = CodeBook(len(settings.groups), book.heads, book.head_dim)
    kind: Device = (
        target.device if with_connector else "cpu"
    )  # without a connector there is nobody to be late
    slow = variant.slow if kind != "cpu" else None
    trace = PairTrace() if settings.engines else Trace()
    start = run_start(
        seed=seed,
        engine=variant.engine,
        case=variant.case.id,
        scheduling=variant.scheduling,
        runner=variant.runner,
        depth=variant.depth,
        vllm=vllm_api.VLLM_VERSION,
        block_size=variant.block_size,
        num_blocks=settings.num_blocks,
        policies=[
            *variant.case.policies,
            *(["sibling-loads"] * bool({"winner", "fetcher"} & set(settings.multi))),
        ],
        connector=target.connector if with_connector else None,
        spec_tokens=settings.spec_tokens,
        role=target.role or settings.role,
        failure_policy=settings.load_failure_policy,
        groups=max(1, len(settings.groups)),
        ranks=settings.tensor_parallel * settings.pipeline_parallel,
        stages=settings.pipeline_parallel,
        context_ranks=settings.context_parallel,
        device=kind,
        slow=slow,
    )
    trace.emit("run.start", **start)
    run = Run(
        variant,
        relation,
        trace.events,
        caps,
        _channels(target) if with_connector else frozenset({"sched", "kv"}),
    )
    tmp.mkdir(parents=True, exist_ok=True)
    if with_connector:
        adapters.install(target.adapters)  # before the connector is imported
        with (
            Patch(target.resolve(), *stand_ins(target, relation)),
            gpu.opened(kind, slow) as where,
            adapters.in_force(target.adapters),  # what they end uses the device
        ):
            _drive(
                run,
                variant,
                target,
                trace,
                Registry(book),
                seed,
                tmp,
                relation,
                caps,
                promises,
                watcher,
            )
            run.lacks = where.lacks
    else:
        _drive(run, variant, target, trace, Registry(book), seed, tmp, relation, caps, None)
    _scrub(trace, str(tmp))
    return run


def _channels(target: Target) -> frozenset[str]:
    if target.half == "scheduler":
        return frozenset({"hooks", "sched"})
    return frozenset({"hooks", "sched", "kv", *(["device"] if target.device == "emulated" else [])})


def _drive(
    run: Run,
    variant: Variant,
    target: Target,
    trace: Trace,
    registry: Registry,
    seed: int,
    tmp: Path,
    relation: str,
    caps: dict[str, Any],
    promises: Promises | None,
    watcher: Watcher | None = None,
) -> None:
    driver, outer = None, Probe.active  # a calibration runs inside another run
    rest, before = list(variant.case.steps), None
    try:
        if split := process_restart(rest):
            first, rest = rest[:split], rest[split + 1 :]
            before, registry = run_first_part(
                lambda: Driver(
                    variant,
                    target,
                    trace,
                    registry,
                    seed=seed,
                    tmp=tmp,
                    relation=relation,
                    caps=caps,
                    promises=promises,
                ),
                first,
                trace,
                lambda dead, error: _conclude(run, trace, dead, error),
            )
        driver = (PairDriver if variant.case.config.engines else Driver)(
            variant,
            target,
            trace,
            registry,
            seed=seed,
            tmp=tmp,
            relation=relation,
            caps=caps,
            promises=promises,
            before=before,
            watcher=watcher,
        )
        driver.execute(rest)
        run.unmet = driver.expectations.unmet(variant.case.provokes)
    except KvconformError:
        raise
    except FirstPartEnded as ended:
        run.harness_error = ended.harness_error
    except (
        Exception,
        HookTimeout,
        SystemExit,
    ) as error:  # whatever connector or engine raised is a finding; our faults are told apart
        _conclude(run, trace, driver, error)
    finally:
        note_unfilled(trace)
        if driver is not None and driver.engine.inspector is not None:
            run.channels |= {"plan"}
        Probe.active = outer


def _scrub(trace: Trace, tmp: str) -> None:
    """Take the run's own directory out of error texts: the same run must give the same trace everywhere."""
    for event in trace.events:
        names = _TEXTS.get(event["kind"])
        if names is None or (
            event["kind"] == "hook.returned" and event["value"] in _SHORT and event["error"] is None
        ):
            continue
        for name in names:
            text = event.get(name)
            if isinstance(text, str) and tmp in text:
                trace.amend(event, **{name: text.replace(tmp, "{tmp}")})


def _conclude(run: Run, trace: Trace, driver: Driver | None, error: BaseException) -> str | None:
    """Finish the trace of a run that stalled or crashed; returns the harness's error, if it is one."""
    try:
        if not isinstance(error, Stalled):
            _crashed(run, trace, driver, error)
        elif driver is not None:
            driver.close(shut_down=True, crashed=False)
    except (
        Exception,
        HookTimeout,
        SystemExit,
    ) as late:  # closing a stalled run shuts the connector down, which may raise too
        _crashed(run, trace, driver, late)
    return run.harness_error


def _crashed(run: Run, trace: Trace, driver: Driver | None, error: BaseException) -> None:
    probe = Probe.active
    last = probe.last_error if probe is not None else None
    where, hook = _blame(error), None
    note_unfilled(trace)
    if where == "harness" and lost(trace.events):
        where = "engine"  # it asked for the impossible
    if last is not None and (
        last[1] is error or last[1] is error.__cause__ or last[1] is error.__context__
    ):
        where, hook = "hook", last[0]
    elif driver is None and where != "harness":
        where, hook = "hook", "__init__"
    elif any(
        e["kind"] == "hook.returned" and (e["mutated_args"] or not e["value_ok"])
        for e in trace.events
    ):
        where = "engine"  # no engine need bear an illegal value
    trace.emit("engine.crash", where=where, error=one_line(error), hook=hook)
    run.traceback = "".join(traceback.format_exception(error))[-6000:]
    if where == "harness":
        run.harness_error = "".join(traceback.format_exception(error))[-3000:]
    if not any(
        e["kind"] == "run.end" for e in trace.events
    ):  # a shutdown that raises comes after it
        if isinstance(trace, PairTrace):
            trace.on = None  # the end of all engines
        trace.emit("run.end", **run_cut_short())
    if driver is not None and not isinstance(error, HookTimeout):
        try:
            driver.shutdown()
        except (
            Exception,
            HookTimeout,
            SystemExit,
        ) as late:  # the run is over; how the connector shuts down after a crash is only noted
            trace.emit(
                "engine.lifecycle",
                op="shutdown",
                pid=0,
                error=f"{type(late).__name__}: {late}"[:200],
            )


def _freeze() -> None:
    """Take what importing vLLM left behind out of the garbage collector's sight: every run collects once to find leaked requests."""
    global _frozen
    if not _frozen:
        gc.collect()
        gc.freeze()
        gc.set_threshold(GARBAGE)
        atexit.register(gc.unfreeze)  # extension modules report what is left at exit as leaks
        _frozen = True
