# SPDX-License-Identifier: Apache-2.0
"""Judges a connector in many vLLM releases.

A worker runs kvconform.versions.observe with the Python of each release, and reads what the process
wrote. Other machines than this one need the releases' environments at the same paths.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from kvconform.compat.installed import runs_on
from kvconform.config.selection import select
from kvconform.config.settings import Settings
from kvconform.contract.loader import Spec, load_spec
from kvconform.execute import work
from kvconform.execute.answers import Death
from kvconform.execute.choice import LOCAL, Choice, executor
from kvconform.judge.aggregate import Aggregate
from kvconform.judge.records import CaseReport, Verdict
from kvconform.process.watchdog import read_note
from kvconform.report.collector import Collector
from kvconform.session import crash
from kvconform.snapshots.document import Run
from kvconform.versions.observe import EngineEvent, Job, chosen, lines

RELEASES = (
    "0.11.2",
    "0.12.0",
    "0.13.0",
    "0.14.1",
    "0.16.0",
    "0.18.1",
    "0.20.2",
    "0.23.0",
    "0.26.0",
    "0.29.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)
"""The default: releases in which the interface or the scheduler's protocol changed."""

MEMORY = 1500 * 2**20
"""Bytes that a process needs; vLLM's modules are half of it."""

DEATHS = 5
"""How often a process may die in one release."""


@dataclass(frozen=True)
class Place:
    """A release and the Python that has it, or the problem why there is none."""

    release: str
    python: str | None = None
    problem: str | None = None


@dataclass
class Release:
    """Result of a release.

    `verdicts`: run -> requirement -> verdict. `hooks`, `engine`: as in observe.
    `snapshots`: run -> kind -> snapshot. `no_snapshot`: run -> problem.
    `messages`: requirement -> message of its first failure. `harness`: error -> runs.
    `problem`: why the release could not be judged, or not completely.
    """

    release: str
    vllm: str | None = None
    problem: str | None = None
    seconds: float = 0.0
    deaths: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    signatures: dict[str, str] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    verdicts: dict[str, dict[str, str]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    harness: dict[str, list[str]] = field(default_factory=dict)
    hooks: dict[str, list[list[Any]]] = field(default_factory=dict)
    engine: dict[str, dict[str, list[EngineEvent]]] = field(default_factory=dict)
    snapshots: dict[str, dict[str, Run]] = field(default_factory=dict)
    no_snapshot: dict[str, str] = field(default_factory=dict)
    found: Aggregate | None = None

    @property
    def verdict(self) -> str:
        """Return `conformant`, `partial`, `nonconformant`, `error`; or `not run`."""
        return self.found.verdict if self.found is not None else "not run"


def jobs(count: int) -> int:
    """Return how many releases to run at a time: one per core, as far as memory allows."""
    try:
        memory = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in memory if line.startswith("MemAvailable"))
        free = int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        free = 2 * MEMORY
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min(count, cores, free // MEMORY))


@dataclass(frozen=True)
class Observing:
    """Description of workers that judge a connector in a release (kvconform.execute.work.Work).

    A piece is a Place, and its result a Release. `folder`: absolute path of a folder of the
    worker's machine for the files of each release's process; None: they are not kept.
    """

    settings: Settings
    snapshots: bool
    all_runs: bool
    folder: Path | None
    fresh: bool = True
    packages: tuple[str, ...] = ()
    gpus: int = 0

    @property
    def folders(self) -> Sequence[str]:
        """The folders in which the connector's package is looked for."""
        return self.settings.pythonpath

    @contextmanager
    def worker(self, place: work.Place) -> Iterator[Callable[[Place], Release]]:
        """Make the folder, and load the specification."""
        copies = [place.here(folder) for folder in self.settings.pythonpath]
        settings = self.settings.model_copy(update={"pythonpath": copies})
        folder = self.folder or place.scratch / place.name
        folder.mkdir(parents=True, exist_ok=True)
        spec = load_spec()
        yield lambda piece: self._judged(piece, settings, spec, folder)

    def _judged(self, place: Place, settings: Settings, spec: Spec, folder: Path) -> Release:
        release = Release(place.release, problem=place.problem)
        if place.python is not None:
            began = time.monotonic()
            job = Job(
                settings=settings,
                note=folder / f"{place.release}.note",
                snapshots=self.snapshots,
                all_runs=self.all_runs,
            )
            out = _observe(place, release, job, folder)
            _read(release, out, settings, spec, all_runs=self.all_runs)
            release.seconds = round(time.monotonic() - began, 1)
        return release


def run(
    places: Sequence[Place],
    observing: Observing,
    *,
    at_once: int | None,
    report: Callable[[Release], None],
    where: Choice = LOCAL,
) -> list[Release]:
    """Return the releases in the order of `places`.

    `at_once`: workers; None: as many as the executor has room for. `report` is called with each
    release, in order.
    """
    releases: list[Release] = []
    with executor(where, observing, "versions", at_once) as workers:
        for place, found in workers.run(places):
            if isinstance(found, Death):
                found = Release(place.release, problem=f"its worker ended {found}")
            report(found)
            releases.append(found)
    return releases


def _observe(place: Place, release: Release, job: Job, folder: Path) -> Path:
    """Run the process, again each time it dies, up to a limit; return the file of its lines."""
    out, job_file, log = (
        folder / f"{place.release}.{name}" for name in ("jsonl", "job.json", "log")
    )
    out.unlink(missing_ok=True)
    job_file.write_text(job.model_dump_json(), encoding="utf-8")
    command = [str(place.python), "-m", "kvconform.versions.observe", str(job_file), str(out)]
    # without a seed, older releases hash blocks at random
    environment = {**os.environ, "PYTHONHASHSEED": "0", **job.settings.env}
    for _ in range(DEATHS + 1):
        with log.open("ab") as said:
            try:
                status = subprocess.run(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
                ).returncode
            except OSError as error:
                release.problem = f"{place.python} cannot be started: {error.strerror or error}"
                return out
        written = lines(out)
        problem = next((line for line in written if line["type"] == "problem"), None)
        if problem is not None:
            release.problem = problem["sentence"]
        if status == 0 or problem is not None:
            return out
        started = [line["variant"] for line in written if line["type"] == "start"]
        finished = {line["variant"] for line in written if line["type"] == "run"}
        died_in_new_run = started and started[-1] not in (*finished, *release.deaths)
        if not died_in_new_run:  # another process would end in the same way
            printed = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = printed[-1] if printed else f"status {status}"
            release.problem = f"the process ended before it was done: {last[:300]}"
            return out
        release.deaths.append(started[-1])
        if job.note.exists():
            job.note.replace(folder / f"{place.release}.{len(release.deaths)}.note")
    release.problem = (
        f"the connector ended the process {DEATHS + 1} times, last in {release.deaths[-1]}"
    )
    return out


def _read(release: Release, out: Path, settings: Settings, spec: Spec, *, all_runs: bool) -> None:
    """Fill in `release` from the lines, and judge it as `kvconform run` would judge these runs."""
    written = lines(out)
    head = next((line for line in written if line["type"] == "release"), None)
    if head is None:
        return
    release.vllm, release.warnings = head["vllm"], head["warnings"]
    release.signatures, release.fields = head["signatures"], head["fields"]
    selection = select(spec, settings, head["vllm"])
    selection.variants = [
        v for v in chosen(selection, all_runs=all_runs) if runs_on(v.runner, head["vllm"])
    ]
    collector = Collector(spec, settings, selection, head["vllm"])
    for line in written:
        if line["type"] == "run":
            _take_run(release, collector, line)
        elif line["type"] == "snapshot" and "snapshot" in line:
            release.snapshots[line["variant"]] = line["snapshot"]
        elif line["type"] == "snapshot":
            release.no_snapshot[line["variant"]] = line["problem"]
    for number, name in enumerate(release.deaths, 1):
        if name in collector.variants:
            note = read_note(out.parent / f"{release.release}.{number}.note")
            variant, caps = collector.variants[name], collector.capabilities
            rows = crash.rows_of(note, variant, spec, selection, caps, settings.strict)
            collector.add(CaseReport(name, rows=rows))
    if collector.reports:
        _judge(release, collector)


def _take_run(release: Release, collector: Collector, line: dict[str, Any]) -> None:
    name = line["variant"]
    if name not in collector.variants:
        release.problem = f"{name} is not selected any more: kvconform was changed during the run"
        return
    collector.add(CaseReport.from_dict(line["report"]))
    release.hooks[name], release.engine[name] = line["hooks"], line["engine"]


def _judge(release: Release, collector: Collector) -> None:
    """Fill in the verdicts of a release, and what failed in it."""
    for report in collector.ordered_reports():
        if report.harness_error:
            last = report.harness_error.strip().splitlines()[-1]
            release.harness.setdefault(last, []).append(report.variant)
    broken = {name for runs in release.harness.values() for name in runs}
    rows, release.found = collector.finish(date.today(), complete=not collector.missing())
    for row in rows:
        release.verdicts.setdefault(row.run, {})[row.requirement] = row.verdict.value
        unexplained = row.verdict is Verdict.ERROR and row.run not in broken
        if row.verdict is Verdict.FAIL or unexplained:
            message = f"{row.run}, step {row.step}: {row.finding}"
            release.messages.setdefault(row.requirement, message)
