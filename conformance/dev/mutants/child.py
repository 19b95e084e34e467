# SPDX-License-Identifier: Apache-2.0
"""The body of a forked process that judges one mutant, or the original.

It imports the connector, makes the runs one by one and sends messages: what it failed, if anything.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvconform.config.settings import Settings
from kvconform.config.target import Target
from kvconform.contract.loader import Spec
from kvconform.dev.mutants.loading import forget, install_everywhere
from kvconform.dev.mutants.mutation import Mutation
from kvconform.dev.mutants.result import case_of
from kvconform.dev.mutants.subject import Run
from kvconform.errors import UsageError
from kvconform.judge.foreign import ForeignKV
from kvconform.judge.records import CaseReport, Verdict
from kvconform.process import clock, watchdog
from kvconform.process.supervisor import dies_with_parent
from kvconform.run.lines import Recorder
from kvconform.run.runs import PlainRuns
from kvconform.session.worker import START_LIMIT, settle_in

EXPLORING = "(exploration)"
RUN_LIMIT = 90.0
"""Least seconds that a run may take; more if the original takes long. Hooks have a limit, too."""
FAR_LESS = 3.0
"""A hang counts if the original takes less than the limit divided by this."""


@dataclass
class Job:
    """What a child does.

    - `mutation`: None for the original. `path`: the file of the mutated module.
    - `runs`: in this order. `plain`: their baseline runs, by the suite's id of the run.
    - `seconds`: those of the original, by run.
    - `limit`: seconds of all runs together, after which no further one begins; None: no limit.
    - `excused`: `case requirement` that kills nothing. `skipped`: runs that judge nothing of the
      original. `known`: causes that exploration may find. `only`: the number of the workload to
      explore, instead of as many as there is time for.
    - `files`: files of the subject's modules, by module.
    """

    mutation: Mutation | None
    path: Path
    runs: Sequence[Run]
    settings: Mapping[str, Settings]
    scratch: Path
    judged: Sequence[str]
    hook_timeout: float
    explore: float
    explore_setup: str
    explore_seed: int = 0
    plain: Mapping[str, PlainRuns] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    excused: frozenset[str] = frozenset()
    skipped: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    only: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)


ELSEWHERE = ("hash-seed", "second-process")
"""Relations of workloads that start processes."""
Message = dict[str, Any]
"""`run`, `seconds`, `failed` (requirements) and `error` (of the harness), about one run.

For a random workload also `number` and `causes`. For the original also `lines` and `skipped`. Or
`start`: why the connector did not start; or `undecided`: why there is no verdict; or `done`, with
`left`: runs that the limit left out.
"""


def serve(connection: Connection, job: Job, spec: Spec) -> None:
    """Judge the mutant, or the original; the body of the child.

    A mutant ends with its first failure; the original makes all runs.
    """
    os.setsid()
    dies_with_parent()
    watchdog.start(job.hook_timeout, job.scratch / "note")
    try:
        _prepare(job)
        # A mutant may take the name of an option for the path of its file.
        os.chdir(job.scratch)
        with ExitStack() as stack:
            targets: dict[str, Target] = {}
            try:
                with watchdog.case("(start)", START_LIMIT):
                    for name, settings in job.settings.items():
                        targets[name] = stack.enter_context(_ready(name, settings, job.scratch))
            except BaseException as error:
                connection.send({"start": f"{type(error).__name__}: {error}".splitlines()[0]})
                return
            if job.mutation is None:
                _original(connection, job, spec, targets)
                left = 0
            else:
                left = _mutant(connection, job, spec, targets)
        connection.send({"done": True, "left": left})
    except ForeignKV as error:
        connection.send({"undecided": error.message})
    finally:
        watchdog.stop()


def _prepare(job: Job) -> None:
    """Install the mutated module, and forget those that this process has imported already."""
    forget(job.files)
    if job.mutation is not None:
        install_everywhere(
            job.mutation.site.module, str(job.path), job.mutation.mutated, job.scratch / "site"
        )


@contextmanager
def _ready(name: str, settings: Settings, scratch: Path) -> Iterator[Target]:
    """Prepare the process for one configuration: output, import path, servers.

    Constructs the connector once, as a session does. KvconformError if that fails.
    """
    from kvconform.run import smoke

    servers, settings = settle_in(settings, scratch, name, scratch)
    try:
        servers.up()
        target = smoke.target_of(settings)
        refused = smoke.check(target, scratch / name, START_LIMIT, engine=settings.engine)
        if refused is not None:
            raise UsageError(refused)
        yield target
    finally:
        servers.down()


def _mutant(connection: Connection, job: Job, spec: Spec, targets: Mapping[str, Target]) -> int:
    """Make the runs and random workloads until one fails; return how many the limit left out."""
    left = 0
    end = None if job.limit is None else clock.monotonic() + job.limit
    for number, run in enumerate(job.runs):
        if end is not None and clock.monotonic() > end:
            left = len(job.runs) - number
            break
        limit = max(RUN_LIMIT, 20 * job.seconds.get(run.id, 0.0))
        start = clock.monotonic()
        with watchdog.case(run.id, limit):
            report = _judge(run, targets[run.setup], spec, job, job.scratch / str(number))
        case = case_of(run.id)
        failed = [each for each in failures(report) if f"{case} {each}" not in job.excused]
        seconds = round(clock.monotonic() - start, 3)
        message: Message = {"run": run.id, "seconds": seconds, "failed": failed}
        if report.harness_error:
            # The harness takes errors of its own connectors for its own.
            message["error"] = report.harness_error.strip().splitlines()[-1]
        connection.send(message)
        if failed or report.harness_error:
            return 0
        if run.id not in job.skipped and (refusal := _refused(report)) is not None:
            connection.send({"start": refusal})
            return 0
    if job.explore > 0:
        _explore(connection, job, spec, targets[job.explore_setup])
    return left


def _original(connection: Connection, job: Job, spec: Spec, targets: Mapping[str, Target]) -> None:
    modules = {file: module for module, file in job.files.items()}
    recorder = Recorder(modules.keys())
    for number, run in enumerate(job.runs):
        start = clock.monotonic()
        with watchdog.case(run.id, 600.0), recorder.recording():
            report = _judge(run, targets[run.setup], spec, job, job.scratch / str(number))
        lines: dict[str, list[int]] = {}
        for file, line in sorted(recorder.taken()):
            lines.setdefault(modules[file], []).append(line)
        message: Message = {
            "run": run.id,
            "seconds": round(clock.monotonic() - start, 3),
            "failed": failures(report),
            "lines": lines,
            "skipped": not any(row.exercised for row in report.rows),
        }
        if report.harness_error:
            message["error"] = report.harness_error.strip().splitlines()[-1]
        connection.send(message)
    if job.explore > 0:
        _explore(connection, job, spec, targets[job.explore_setup])


def _judge(run: Run, target: Target, spec: Spec, job: Job, tmp: Path) -> CaseReport:
    from kvconform.run.case import run_and_judge

    # Copied: a run may add to it.
    plain = dict(job.plain.get(run.variant.id, {}))
    return run_and_judge(
        run.variant,
        target,
        spec,
        seed=0,
        tmp=tmp,
        requirements=job.judged,
        plain=plain,
        brief=True,
    )


def _refused(report: CaseReport) -> str | None:
    """Return why a run judged nothing of the connector, or None if it did."""
    if any(row.exercised or row.verdict is not Verdict.UNSUPPORTED for row in report.rows):
        return None
    return report.rows[0].message if report.rows else None


def failures(report: CaseReport) -> list[str]:
    """Return the requirements whose failure makes a connector NOT CONFORMANT."""
    return [row.requirement for row in report.rows if row.accuses]


def _explore(connection: Connection, job: Job, spec: Spec, target: Target) -> None:
    """Run random workloads for a time; send the first failure that the original does not have.

    The original runs for the whole time, and sends all causes.
    """
    from kvconform.explore.draw import drawn
    from kvconform.explore.outcome import outcome
    from kvconform.explore.workload import Workload

    settings = job.settings[job.explore_setup]
    workloads = drawn(
        settings.engines,
        settings.schedulings,
        settings.slows,
        first_seed=job.explore_seed,
        count=1_000_000,
    )
    numbered: Iterator[tuple[int, Workload]] = enumerate(workloads)
    if job.only is not None:
        numbered = islice(numbered, job.only, job.only + 1)
    end = clock.monotonic() + job.explore
    known = set(job.known)
    for number, workload in numbered:
        if clock.monotonic() > end:
            return
        if not set(workload.data.get("relations", [])).isdisjoint(ELSEWHERE):
            continue  # it takes as long as many others
        start = clock.monotonic()
        with watchdog.case(EXPLORING, RUN_LIMIT):
            found = outcome(workload, target, spec, job.scratch / "explored")
        causes = {str(each.key) for each in found.failures if not each.risk} - known
        error = f"harness: {found.error}"
        if found.error and error not in known:
            causes.add(error)
        seconds = round(clock.monotonic() - start, 3)
        failed = sorted({each.requirement for each in found.failures if str(each.key) in causes})
        message: Message = {
            "run": EXPLORING,
            "seconds": seconds,
            "failed": failed,
            "number": number,
            "causes": sorted(causes),
        }
        if error in causes:
            message["error"] = found.error
        connection.send(message)
        if causes and job.mutation is not None:
            return
        known |= causes


def warm() -> None:
    """Import what every child needs, but no connector."""
    for name in (
        "compat.vllm_api",
        "run.case",
        "run.smoke",
        "explore.draw",
        "explore.outcome",
        "refimpl.scheduler",
    ):
        importlib.import_module(f"kvconform.{name}")
