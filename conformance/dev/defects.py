# SPDX-License-Identifier: Apache-2.0
"""Control runs: what the defects are changes of, on the same cases, must fail nothing. Else a defect may be found for another reason.

Known-bad connectors and engine faults: does the suite find each of them, by the requirements that it names and by no others?

`spec/defects.yaml` lists them. `kvconform defects` prints which requirement catches which, and fails when that is not as listed.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconform.config.selection import Selection
from kvconform.contract.case import SLOW, Device
from kvconform.contract.loader import Spec, load_spec
from kvconform.contract.requirement import Requirement
from kvconform.dev.defect import (
    REFERENCE,
    Defect,
    KillMatrix,
    Outcome,
    build,
    driven,
    load_defects,
    print_matrix,
    write,
)
from kvconform.errors import UsageError
from kvconform.files import scratch_root
from kvconform.process.server import ServerSpec

PLANTED = "kvconform.refimpl.defects."
AT_ONCE = 12
"""Runs per task of a worker process."""


@dataclass(frozen=True)
class Control:
    """Runs of one correct connector. `options`, `capabilities` and `servers`: JSON. `runs`: (case, id of its variant)."""

    connector: str
    options: str
    capabilities: str
    runs: tuple[tuple[str, str], ...]
    emulate_cuda: bool = False
    servers: str = "[]"


def plan(defects: Iterable[Defect], spec: Spec) -> list[Control]:
    """The control runs for these defects, each once. Imports their connectors."""
    found: dict[tuple[str, str, str, bool, str], dict[tuple[str, str], None]] = {}
    for defect in defects:
        key = (
            sound(defect.connector),
            json.dumps(defect.extra_config, sort_keys=True),
            json.dumps(defect.capabilities, sort_keys=True),
            defect.emulate_cuda,
            json.dumps([server.model_dump() for server in defect.servers], sort_keys=True),
        )
        runs = found.setdefault(key, {})
        runs.update(
            dict.fromkeys((variant.case.id, variant.id) for variant in defect.variants(spec))
        )
    tasks = (
        (key, list(runs), first)
        for key, runs in found.items()
        for first in range(0, len(runs), AT_ONCE)
    )
    return [
        Control(*key[:3], tuple(runs[first : first + AT_ONCE]), emulate_cuda=key[3], servers=key[4])
        for key, runs, first in tasks
    ]


def sound(connector: str) -> str:
    """The nearest ancestor of a connector class that is no defect, or its `change_of`, where what is wrong is what it descends from; the
    reference connector if there is neither."""
    from kvconform.config.target import Target

    for cls in Target(connector, {}).resolve().__mro__:
        cls = vars(cls).get("change_of", cls)
        if cls.__module__.startswith("kvconform.refimpl.") and not cls.__module__.startswith(
            PLANTED
        ):
            return f"{cls.__module__}:{cls.__name__}"
    return REFERENCE


def run(control: Control, spec: Spec, tmp: Path) -> Outcome:
    """Make the runs. What vLLM itself breaks (guarantees on engine `vllm`) is a finding, and no failure here."""
    from kvconform.process import watchdog

    pass
    from kvconform.run.case import run_and_judge

    options: Mapping[str, Any] = {
        "extra_config": json.loads(control.options),
        "capabilities": json.loads(control.capabilities),
    }
    servers = [ServerSpec.model_validate(server) for server in json.loads(control.servers)]
    defect = Defect.model_construct(
        id="control",
        connector=control.connector,
        emulate_cuda=control.emulate_cuda,
        servers=servers,
        **options,
    )
    outcome = Outcome(defect=f"control: {control.connector}")
    watchdog.start(defect.hook_timeout)
    try:
        with served(defect, tmp) as extra_config:
            for number, (case, name) in enumerate(control.runs):
                slow = SLOW if control.emulate_cuda else None
                variant = next(
                    each
                    for each in driven(spec, case).variants(
                        ("reference", "vllm", "live"), None, slow
                    )
                    if each.id == name
                )
                report = run_and_judge(
                    variant,
                    target_of(defect, variant.block_size, extra_config),
                    spec,
                    seed=0,
                    tmp=tmp / str(number),
                )
                outcome.take(
                    name,
                    [
                        row
                        for row in report.rows
                        if variant.engine != "vllm" or row.get("kind") != "guarantee"
                    ],
                )
                if report.harness_error:
                    outcome.failed.setdefault("the harness", []).append(name)
    finally:
        watchdog.stop()
    if outcome.failed:
        told = (
            f"{name} in {runs[0]}" + f" and {len(runs) - 1} more" * (len(runs) > 1)
            for name, runs in outcome.failed.items()
        )
        outcome.problem = f"is no defect, and fails {'; '.join(told)}"
    return outcome


if TYPE_CHECKING:
    from kvconform.config.target import Target


def examine(defect: Defect, spec: Spec, tmp: Path, note: Path | None = None) -> Outcome:
    """Run one defect on its cases. Writes below `tmp` only; an engine's fault is in force meanwhile. `note`: see watchdog."""
    from kvconform.process import watchdog
    from kvconform.run.calibration import target_profile
    from kvconform.run.case import run_and_judge

    outcome, fault, start = Outcome(defect=defect.id), defect.fault(), time.perf_counter()
    watchdog.start(defect.hook_timeout, note)
    try:
        stack = ExitStack()
        options = stack.enter_context(served(defect, tmp))
        variants = [
            (variant, target_of(defect, variant.block_size, options))
            for variant in defect.variants(spec)
        ]
        for _, target in variants:
            target_profile(
                target, tmp
            )  # kept for later runs: an engine without fault is what it has to be worked out on
        with stack, fault.active() if fault is not None else nullcontext():
            for number, (variant, target) in enumerate(variants):
                with watchdog.case(variant.id):
                    report = run_and_judge(variant, target, spec, seed=0, tmp=tmp / str(number))
                if report.harness_error:
                    outcome.problem = f"the harness broke on {variant.id}: {report.harness_error.splitlines()[-1]}"
                    return outcome
                outcome.take(variant.id, report.rows, defect.fails)
    finally:
        watchdog.stop()
        outcome.seconds = round(time.perf_counter() - start, 2)
    return settled(outcome, defect)


def settled(outcome: Outcome, defect: Defect) -> Outcome:
    """The outcome of all runs, compared with what is listed. Changes and returns it."""
    outcome.passed_by = {
        name: verdicts for name, verdicts in outcome.passed_by.items() if name not in outcome.failed
    }
    outcome.problem = difference(defect, set(outcome.failed), outcome.passed_by)
    return outcome


@contextmanager
def served(defect: Defect, tmp: Path) -> Iterator[dict[str, Any]]:
    """The defect's options, with the ports of its servers, which run meanwhile. EnvironmentProblem if one does not start."""
    from kvconform.config.settings import Settings
    from kvconform.process.servers import Servers

    settings = Settings(extra_config=defect.extra_config, servers=defect.servers)
    if not settings.servers:
        yield dict(settings.extra_config)
        return
    with Servers(settings, tmp / "of-servers", tmp / "logs") as servers:
        yield dict(servers.settle(settings).extra_config)


def target_of(defect: Defect, block_size: int, options: Mapping[str, Any] | None = None) -> Target:
    """The connector of a defect, on an engine with blocks of `block_size` tokens. `options`: instead of its own."""
    from kvconform.config.target import Target

    # What the connector sets out to do is what the reference connector does: a defect must not talk its way out of a requirement.
    sound = {
        "store": True,
        "saves": "all",
        "chunk_tokens": block_size,
        "async_load": defect.extra_config.get("load") == "async",
    }
    own = defect.extra_config if options is None else options
    options = dict(own) if _has_own_options(defect) else {"store": "{tmp}/store", **own}
    declared = {**sound, **defect.capabilities}
    device: Device = "emulated" if defect.emulate_cuda else "cpu"
    return Target(
        defect.connector,
        options,
        capabilities=declared,
        hook_timeout=defect.hook_timeout,
        device=device,
    )


def _has_own_options(defect: Defect) -> bool:
    """Whether it is no reference connector, and would not know the option `store`."""
    from kvconform.config.target import Target
    from kvconform.refimpl.connector import ReferenceConnector

    return defect.connector != REFERENCE and not issubclass(
        Target(defect.connector, {}).resolve(), ReferenceConnector
    )


def difference(
    defect: Defect, failed: set[str], verdicts: Mapping[str, Mapping[str, int]] | None = None
) -> str:
    """How the failed requirements differ from those listed; empty if they do not.

    `verdicts`: of requirements that did not fail, what they said and how often. One that never passed was not at stake.
    """
    missed, extra = (
        sorted(set(defect.fails) - failed),
        sorted(failed - set(defect.fails) - set(defect.may)),
    )
    silent = {
        name: said for name in missed if (said := (verdicts or {}).get(name)) and "PASS" not in said
    }
    judged = [name for name in missed if name not in silent]
    parts = [f"not caught by {', '.join(judged)}"] * bool(judged)
    for name, said in silent.items():
        runs = f"in all {sum(said.values())} runs" if sum(said.values()) > 1 else "in the one run"
        parts.append(f"{name} was {' or '.join(said)} {runs} of {', '.join(defect.cases)}")
    return "; ".join([*parts, *[f"also fails {', '.join(extra)}"] * bool(extra)])


@cache
def specification() -> Spec:
    """The specification, read once in this process."""
    return load_spec()


@cache
def known_defects() -> dict[str, Defect]:
    """All defects by id, read once in this process."""
    return load_defects(specification())


def examine_named(name: str) -> Outcome:
    """`examine` for a worker process, which reads the specification once."""
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as tmp:
        defect = known_defects()[name]
        return (examine_apart if defect.own_process else examine)(
            defect, specification(), Path(tmp)
        )


def examine_apart(defect: Defect, spec: Spec, tmp: Path) -> Outcome:
    """As `examine`, in a process of its own; if that ends, its note says where, and that is what the defect is found by."""
    from kvconform.process import watchdog
    from kvconform.session import crash

    note, result, start = tmp / "note", tmp / "outcome.json", time.perf_counter()
    child = get_context("spawn").Process(target=_examine_into, args=(defect.id, note, result))
    child.start()
    child.join()
    if result.exists():
        return Outcome.model_validate_json(result.read_text(encoding="utf-8"))
    left = watchdog.read_note(note)
    variant = next(
        (each for each in defect.variants(spec) if left is not None and each.id == left.case), None
    )
    outcome = Outcome(defect=defect.id, seconds=round(time.perf_counter() - start, 2))
    if variant is None:
        outcome.problem = f"the process ended outside of its runs: {crash.sentence(left)}"
        return outcome
    judged = [requirement.id for requirement in in_force(spec)]
    selection = Selection([variant], judged, judged, [])
    rows = [
        row.to_dict()
        for row in crash.rows_of(left, variant, spec, selection, defect.capabilities, False)
    ]
    outcome.take(variant.id, rows, defect.fails)
    return settled(outcome, defect)


def _examine_into(name: str, note: Path, result: Path) -> None:
    outcome = examine(known_defects()[name], specification(), result.parent, note)
    result.write_text(outcome.model_dump_json(), encoding="utf-8")


def run_defects(names: list[str], jobs: int) -> Iterator[Outcome]:
    """Examine the named defects (none: all but those of engine live) in `jobs` processes, then make their control runs. UsageError for an
    unknown name."""
    names = named(names)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # of the processes that do it
    return _outcomes(
        names or [name for name, defect in known_defects().items() if not defect.live], jobs
    )


def named(ids: Iterable[str]) -> list[str]:
    """The defects of these ids; a requirement stands for those that it has to find. UsageError for what is neither, or has none."""
    found: dict[str, None] = {}
    for name in ids:
        mine = (
            [name]
            if name in known_defects()
            else [each.id for each in known_defects().values() if name in each.fails]
        )
        if not mine and name in specification().requirements:
            raise UsageError(f"no defect violates {name}")
        if not mine:
            close = difflib.get_close_matches(
                name, [*known_defects(), *specification().requirements], 3
            )
            raise UsageError(
                f"there is no defect or requirement {name!r}"
                + (f"; did you mean {' or '.join(close)}?" if close else "")
            )
        found.update(dict.fromkeys(mine))
    return list(found)


def _outcomes(names: list[str], jobs: int) -> Iterator[Outcome]:
    """First the defects, then the control runs."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        planned = pool.submit(_plan_controls, names)
        outcomes = [pool.submit(examine_named, name) for name in names]
        outcomes += [pool.submit(_run_control, control) for control in planned.result()]
        yield from (outcome.result() for outcome in outcomes)


def _plan_controls(names: list[str]) -> list[Control]:
    return plan([known_defects()[name] for name in names], specification())


def _run_control(control: Control) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as tmp:
        return run(control, specification(), Path(tmp))


def in_force(spec: Spec) -> list[Requirement]:
    """The requirements that the installed vLLM is held to."""
    from kvconform.compat.installed import source_version

    version = source_version()
    return [
        requirement
        for requirement in spec.requirements.values()
        if version is None or requirement.in_force(version)
    ]


def _at_stake(names: list[str]) -> list[Requirement]:
    """The requirements that these defects (none: all but those of engine live) can be found by."""
    return [
        requirement
        for requirement in in_force(specification())
        if names or requirement.engines != ["live"]
    ]


def main(
    names: list[str], *, jobs: int = 0, report_dir: str | None = None, strict: bool = False
) -> int:
    """The command: 0 if every defect is caught exactly as listed and no control run fails anything, 1 if not, 2 for an unknown name.

    `jobs` processes (0: as many as there are cores, at most 4). With `report_dir`, the kill matrix is written there. With `strict`, a MUST
    that no defect violates is a failure too.
    """
    try:
        known, outcomes = (
            known_defects(),
            list(run_defects(names, jobs or min(4, len(os.sched_getaffinity(0))))),
        )
    except UsageError as error:
        print(error.message, file=sys.stderr)
        return error.code
    controls = [outcome for outcome in outcomes if outcome.defect not in known]
    matrix: KillMatrix = build(
        [each for each in outcomes if each not in controls],
        known,
        _at_stake(names),
        controls,
        complete=not names,
    )
    print_matrix(matrix)
    if report_dir is not None:
        write(matrix, Path(report_dir))
    return int(any(outcome.problem for outcome in outcomes) or (strict and bool(matrix.unkilled)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
