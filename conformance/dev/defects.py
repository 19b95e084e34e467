# SPDX-License-Identifier: Apache-2.0
"""Planted defects: run them, and check that exactly the listed requirements find them.

This is `kvconform defects`. spec/defects.yaml lists the defects: known-bad connectors and engine
faults. The command prints which requirement catches which, and fails if that is not as listed. It
also makes control runs: the correct connectors that the defects are derived from must fail nothing
on the same cases. Otherwise a defect may be caught for another reason.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

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
from kvconform.errors import EnvironmentProblem, KvconformError, UsageError, did_you_mean
from kvconform.execute.answers import Death
from kvconform.execute.choice import LOCAL, Choice, executor
from kvconform.execute.work import Calls
from kvconform.files import scratch_root
from kvconform.process.clock import monotonic
from kvconform.process.forking import forked_after_import
from kvconform.process.server import ServerSpec

if TYPE_CHECKING:
    from kvconform.config.target import Target
    from kvconform.refimpl.faulty import Fault

PLANTED = "kvconform.refimpl.defects."
AT_ONCE = 12
"""Runs per task of a worker process."""


@dataclass(frozen=True)
class Control:
    """Control runs of one correct connector. `runs`: (case, id of its variant)."""

    connector: str
    extra_config: Mapping[str, Any]
    capabilities: Mapping[str, Any]
    runs: tuple[tuple[str, str], ...] = ()
    emulate_cuda: bool = False
    servers: Sequence[ServerSpec] = ()
    extra_config_after_restart: Mapping[str, Any] = field(default_factory=dict)
    router: str | None = None

    @property
    def setup(self) -> str:
        """A text that is equal for controls that differ only in their runs."""
        settings = {
            "connector": self.connector,
            "extra_config": self.extra_config,
            "extra_config_after_restart": self.extra_config_after_restart,
            "capabilities": self.capabilities,
            "emulate_cuda": self.emulate_cuda,
            "router": self.router,
            "servers": [server.model_dump() for server in self.servers],
        }
        return json.dumps(settings, sort_keys=True)


def plan(defects: Iterable[Defect], spec: Spec) -> list[Control]:
    """Return the control runs for these defects, each once. Imports their connectors."""
    controls: dict[str, Control] = {}
    runs: dict[str, dict[tuple[str, str], None]] = {}
    for defect in defects:
        control = Control(
            sound(defect.connector),
            defect.extra_config,
            defect.capabilities,
            emulate_cuda=defect.emulate_cuda,
            servers=defect.servers,
            extra_config_after_restart=defect.extra_config_after_restart,
            router=defect.router,
        )
        controls.setdefault(control.setup, control)
        runs.setdefault(control.setup, {}).update(
            dict.fromkeys((variant.case.id, variant.id) for variant in defect.variants(spec))
        )
    planned = []
    for setup, control in controls.items():
        mine = tuple(runs[setup])
        for first in range(0, len(mine), AT_ONCE):
            planned.append(replace(control, runs=mine[first : first + AT_ONCE]))
    return planned


def sound(connector: str) -> str:
    """Return the correct connector that a defective one is derived from.

    It is the nearest ancestor that is no defect, or the `change_of` of a class (for those whose
    fault is the class that they inherit from), or else the reference connector.
    """
    from kvconform.config.target import Target

    for cls in Target(connector, {}).resolve().__mro__:
        cls = vars(cls).get("change_of", cls)
        if cls.__module__.startswith("kvconform.refimpl.") and not cls.__module__.startswith(
            PLANTED
        ):
            return f"{cls.__module__}:{cls.__name__}"
    return REFERENCE


def run(control: Control, spec: Spec, tmp: Path) -> Outcome:
    """Make the control runs. Guarantees that vLLM itself breaks on engine `vllm` do not count."""
    from kvconform.process import watchdog
    from kvconform.run.case import run_and_judge

    defect = Defect.model_construct(
        id="control",
        connector=control.connector,
        extra_config=dict(control.extra_config),
        extra_config_after_restart=dict(control.extra_config_after_restart),
        capabilities=dict(control.capabilities),
        emulate_cuda=control.emulate_cuda,
        servers=list(control.servers),
        router=control.router,
    )
    outcome = Outcome(defect=f"control: {control.connector}")
    slow = SLOW if control.emulate_cuda else None
    start = monotonic()
    watchdog.start(defect.hook_timeout)
    try:
        with served(defect, tmp) as extra_config:
            for number, (case, name) in enumerate(control.runs):
                variants = driven(spec, case).variants(("reference", "vllm", "live"), None, slow)
                variant = next(each for each in variants if each.id == name)
                target = target_of(defect, variant.block_size, extra_config)
                report = run_and_judge(variant, target, spec, seed=0, tmp=tmp / str(number))
                rows = report.rows
                if variant.engine == "vllm":
                    rows = [row for row in rows if row.kind != "guarantee"]
                outcome.take(name, rows)
                if report.harness_error:
                    outcome.failed.setdefault("the harness", []).append(name)
    finally:
        watchdog.stop()
        outcome.seconds = round(monotonic() - start, 2)
    if outcome.failed:
        failures = "; ".join(
            f"{name} in {runs[0]}" + f" and {len(runs) - 1} more" * (len(runs) > 1)
            for name, runs in outcome.failed.items()
        )
        outcome.problem = f"is no defect, and fails {failures}"
    return outcome


def examine(
    defect: Defect,
    spec: Spec,
    tmp: Path,
    note: Path | None = None,
    watched: Container[str] | None = None,
) -> Outcome:
    """Run one defect on its cases.

    Writes only below `tmp`; an engine fault is active meanwhile. `note`: see watchdog. `watched`:
    requirements whose other verdicts than FAIL are recorded, too; the default is what should fail.
    """
    from kvconform.process import watchdog
    from kvconform.run.calibration import target_profile
    from kvconform.run.case import run_and_judge

    outcome = Outcome(defect=defect.id)
    fault = defect.fault()
    start = monotonic()
    watchdog.start(defect.hook_timeout, note)
    try:
        stack = ExitStack()
        options = stack.enter_context(served(defect, tmp))
        variants = [
            (variant, target_of(defect, variant.block_size, options))
            for variant in defect.variants(spec)
        ]
        for _, target in variants:
            # Fills the cache: the profile must come from an engine without the fault.
            target_profile(target, tmp)
        with stack, in_force_for(defect, fault):
            for number, (variant, target) in enumerate(variants):
                with watchdog.case(variant.id):
                    report = run_and_judge(variant, target, spec, seed=0, tmp=tmp / str(number))
                if report.harness_error:
                    last = report.harness_error.splitlines()[-1]
                    outcome.problem = f"the harness broke on {variant.id}: {last}"
                    return outcome
                outcome.take(variant.id, report.rows, defect.fails if watched is None else watched)
    finally:
        watchdog.stop()
        outcome.seconds = round(monotonic() - start, 2)
    return settled(outcome, defect)


def in_force_for(defect: Defect, fault: Fault | None) -> AbstractContextManager[Any]:
    """Return a context in which an engine's fault is in force; None: none.

    On engine live it is in force in the processes of vLLM, except those of baseline runs.
    """
    from kvconform.live.plugin import FAULT

    if fault is None:
        return nullcontext()
    if not defect.live:
        return fault.active()
    assert defect.engine_fault is not None
    return patch.dict(os.environ, {FAULT: defect.engine_fault})


def settled(outcome: Outcome, defect: Defect) -> Outcome:
    """Compare the outcome of all runs with what is listed. Changes and returns the outcome."""
    outcome.passed_by = {
        name: verdicts for name, verdicts in outcome.passed_by.items() if name not in outcome.failed
    }
    counts = {
        name: {verdict: len(alike.runs) for verdict, alike in verdicts.items()}
        for name, verdicts in outcome.passed_by.items()
    }
    outcome.problem = difference(defect, set(outcome.failed), counts)
    return outcome


@contextmanager
def served(defect: Defect, tmp: Path) -> Iterator[dict[str, Any]]:
    """Run the defect's servers; yield its options with their ports.

    EnvironmentProblem if a server does not start.
    """
    from kvconform.config.settings import Settings
    from kvconform.process.servers import Servers

    settings = Settings(extra_config=defect.extra_config, servers=defect.servers)
    if not settings.servers:
        yield dict(settings.extra_config)
        return
    with Servers(settings, tmp / "of-servers", tmp / "logs") as servers:
        yield dict(servers.settle(settings).extra_config)


def target_of(defect: Defect, block_size: int, options: Mapping[str, Any] | None = None) -> Target:
    """Return the connector of a defect, on an engine with blocks of `block_size` tokens.

    `options` replaces the defect's own.
    """
    from kvconform.config.target import Target

    # Declare what the reference connector does: a defect must not evade a requirement by declaring
    # less, unless it says so (null).
    expected = {
        "store": True,
        "saves": "all",
        "chunk_tokens": block_size,
        "async_load": defect.extra_config.get("load") == "async",
    }
    own = defect.extra_config if options is None else options
    options = dict(own) if _has_own_options(defect) else {"store": "{tmp}/store", **own}
    device: Device = "emulated" if defect.emulate_cuda else "cpu"
    declared = {**expected, **defect.capabilities}
    return Target(
        defect.connector,
        options,
        capabilities={name: value for name, value in declared.items() if value is not None},
        device=device,
        extra_config_after_restart=defect.extra_config_after_restart,
        router=defect.router,
    )


def _has_own_options(defect: Defect) -> bool:
    """Return whether it is no reference connector, and so does not know the option `store`."""
    from kvconform.config.target import Target
    from kvconform.refimpl.connector import ReferenceConnector

    return defect.connector != REFERENCE and not issubclass(
        Target(defect.connector, {}).resolve(), ReferenceConnector
    )


def difference(
    defect: Defect, failed: set[str], verdicts: Mapping[str, Mapping[str, int]] | None = None
) -> str:
    """Return how the failed requirements differ from those listed; "" if they do not.

    `verdicts` are the verdicts of requirements that did not fail, with counts. A requirement that
    never passed was not exercised, and is reported differently.
    """
    missed = sorted(set(defect.fails) - failed)
    extra = sorted(failed - set(defect.fails) - set(defect.may))
    silent = {}
    for name in missed:
        found = (verdicts or {}).get(name)
        if found and "PASS" not in found:
            silent[name] = found
    judged = [name for name in missed if name not in silent]
    parts = []
    if judged:
        parts.append(f"not caught by {', '.join(judged)}")
    for name, found in silent.items():
        total = sum(found.values())
        runs = f"in all {total} runs" if total > 1 else "in the one run"
        parts.append(f"{name} was {' or '.join(found)} {runs} of {', '.join(defect.cases)}")
    if extra:
        parts.append(f"also caught by {', '.join(extra)}, which its entry does not list")
    return "; ".join(parts)


@cache
def specification() -> Spec:
    """Return the specification, loaded once per process."""
    return load_spec()


@cache
def known_defects() -> dict[str, Defect]:
    """Return all defects by id, loaded once per process."""
    return load_defects(specification())


def examine_named(name: str) -> Outcome:
    """Examine a defect in a worker process."""
    defect = known_defects()[name]
    how = examine_apart if defect.own_process else examine
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as tmp:
        return how(defect, specification(), Path(tmp))


def examine_apart(defect: Defect, spec: Spec, tmp: Path) -> Outcome:
    """Examine a defect in a process of its own.

    If that process dies, its note says in which run, and the death is what finds the defect.
    """
    from kvconform.process import watchdog
    from kvconform.session import crash

    note = tmp / "note"
    result = tmp / "outcome.json"
    start = monotonic()
    child = forked_after_import().Process(target=_examine_into, args=(defect.id, note, result))
    child.start()
    child.join()
    if result.exists():
        return Outcome.model_validate_json(result.read_text(encoding="utf-8"))
    left = watchdog.read_note(note)
    case = None if left is None else left.case
    variant = next((each for each in defect.variants(spec) if each.id == case), None)
    outcome = Outcome(defect=defect.id, seconds=round(monotonic() - start, 2))
    if variant is None:
        outcome.problem = f"the process ended outside of its runs: {crash.sentence(left)}"
        return outcome
    judged = [requirement.id for requirement in in_force(spec)]
    selection = Selection([variant], judged, judged, [])
    rows = crash.rows_of(left, variant, spec, selection, defect.capabilities, False)
    outcome.take(variant.id, rows, defect.fails)
    return settled(outcome, defect)


def _examine_into(name: str, note: Path, result: Path) -> None:
    outcome = examine(known_defects()[name], specification(), result.parent, note)
    result.write_text(outcome.model_dump_json(), encoding="utf-8")


def run_defects(names: list[str], jobs: int | None, where: Choice = LOCAL) -> Iterator[Outcome]:
    """Examine the named defects with `jobs` workers, then make their control runs.

    No names: all defects but those of engine live. UsageError for an unknown name.
    """
    names = named(names)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # inherited by the processes
    if not names:
        names = [name for name, defect in known_defects().items() if not defect.live]
    return _outcomes(names, jobs, where)


def named(ids: Iterable[str]) -> list[str]:
    """Return the defects of these ids; a requirement stands for those that it has to find.

    UsageError for an unknown id, and for a requirement without defects.
    """
    found: dict[str, None] = {}
    for name in ids:
        if name in known_defects():
            mine = [name]
        else:
            mine = [each.id for each in known_defects().values() if name in each.fails]
        if not mine and name in specification().requirements:
            raise UsageError(f"no defect violates {name}")
        if not mine:
            close = did_you_mean(name, [*known_defects(), *specification().requirements])
            close = close or "; spec/defects.yaml lists the defects"
            raise UsageError(f"there is no defect or requirement {name!r}{close}")
        found.update(dict.fromkeys(mine))
    return list(found)


@dataclass(frozen=True)
class Plan:
    """A piece of work: plan the control runs for these defects."""

    names: tuple[str, ...]


Piece = Plan | Control | str
"""What a worker does: plan, make control runs, or examine the defect of this id."""


def _outcomes(names: list[str], jobs: int | None, where: Choice) -> Iterator[Outcome]:
    """Yield the outcomes of the defects, then those of the control runs."""
    work: Calls[Piece, Any] = Calls(_done)
    with executor(where, work, "defects", jobs) as workers:
        [(_, controls)] = workers.run([Plan(tuple(names))])
        if isinstance(controls, Death):
            raise EnvironmentProblem(f"the import of the defects ended the process {controls}")
        for piece, outcome in workers.run([*names, *controls]):
            yield _died(piece, outcome) if isinstance(outcome, Death) else outcome


def _done(piece: Piece) -> Outcome | list[Control]:
    """Do a piece of work in a worker."""
    from kvconform.process import alive

    alive.begin()  # what other defects have left is not to be waited for
    if isinstance(piece, Plan):
        return plan([known_defects()[name] for name in piece.names], specification())
    return _run_control(piece) if isinstance(piece, Control) else examine_named(piece)


def _died(piece: Piece, death: Death) -> Outcome:
    """Return the outcome of a defect, or of control runs, that ended the process."""
    name = piece if isinstance(piece, str) else "control"
    if isinstance(piece, Control):
        name = f"control: {piece.connector}"
    return Outcome(defect=name, problem=f"ended the process {death}")


def _run_control(control: Control) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as tmp:
        return run(control, specification(), Path(tmp))


def in_force(spec: Spec) -> list[Requirement]:
    """Return the requirements that apply to the installed vLLM; all if its version is unknown."""
    from kvconform.compat.installed import UNKNOWN, vllm_version

    version = vllm_version()
    requirements = list(spec.requirements.values())
    if version is None or version == UNKNOWN:
        return requirements
    return [requirement for requirement in requirements if requirement.in_force(version)]


def _concerned(names: list[str]) -> list[Requirement]:
    """Return the requirements that can find these defects (none: all but those of engine live)."""
    return [
        requirement
        for requirement in in_force(specification())
        if names or requirement.engines != ["live"]
    ]


def main(
    names: list[str],
    *,
    jobs: int = 0,
    report_dir: str | None = None,
    strict: bool = False,
    where: Choice = LOCAL,
) -> int:
    """Run the command.

    Returns 0 if every defect is caught exactly as listed and no control run fails anything, 1 if
    not. UsageError for an unknown name. `jobs` is the number of workers; 0: two more than cores,
    because runs often wait, but at most 4. The kill matrix is written to `report_dir`, if given.
    With `strict`, a MUST that no defect violates is a failure too.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # of every process
    workers = where.workers(jobs or None, min(4, len(os.sched_getaffinity(0)) + 2))
    known = known_defects()
    outcomes = []
    for outcome in run_defects(names, workers, where):
        outcomes.append(outcome)
        if outcome.problem:  # at once; the matrix comes when all are done
            print(f"{outcome.defect}: {outcome.problem}", file=sys.stderr, flush=True)
    controls = [outcome for outcome in outcomes if outcome.defect not in known]
    matrix: KillMatrix = build(
        [each for each in outcomes if each not in controls],
        known,
        _concerned(names),
        controls,
        complete=not names,
    )
    print_matrix(matrix)
    if report_dir is not None:
        write(matrix, Path(report_dir))
    return int(any(outcome.problem for outcome in outcomes) or (strict and bool(matrix.unkilled)))


def _command(arguments: list[str]) -> int:
    """Run the command for ids alone, and print an error as `kvconform defects` does."""
    try:
        if any(word.startswith("-") for word in arguments):
            raise UsageError("this command takes ids only; `kvconform defects` takes options")
        return main(arguments)
    except KvconformError as error:
        print(f"kvconform: {error.message}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(_command(sys.argv[1:]))
