# SPDX-License-Identifier: Apache-2.0
"""A connector judged in many vLLM releases, and what changed from one release to the next: `python -m kvconform.versions`.

Runs kvconform.versions.observe with the Python of each release, some at a time, and reads what it wrote.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from kvconform.compat.installed import runs_on
from kvconform.config.selection import select
from kvconform.config.settings import Settings
from kvconform.contract.loader import Spec
from kvconform.judge.aggregate import Aggregate
from kvconform.judge.verdict import Row, Verdict, new_row
from kvconform.process.watchdog import read_note
from kvconform.report.collector import CaseNotes, Collector
from kvconform.session import crash
from kvconform.versions.observe import Job, chosen, lines

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
"""The releases that are compared when none are named: those in which the interface or the scheduler's protocol changed."""


MEMORY = 1500 * 2**20
"""Bytes that a process needs: vLLM's modules are half of it."""

DEATHS = 5
"""How often a process may die in one release."""


@dataclass(frozen=True)
class Place:
    """A release and the Python that has it, or why there is none."""

    release: str
    python: str | None = None
    problem: str | None = None


@dataclass
class Release:
    """What came of a release. `verdicts`: run -> requirement -> verdict; `hooks` and `engine` as in observe; `snapshots`: run -> kind ->
    text; `messages`: what the first failure of a requirement says; `harness`: error of the harness -> runs.

    `problem`: why it could not be judged, or not to the end.
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
    engine: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    snapshots: dict[str, dict[str, str]] = field(default_factory=dict)
    no_snapshot: dict[str, str] = field(default_factory=dict)
    found: Aggregate | None = None

    @property
    def verdict(self) -> str:
        """`conformant`, `partial`, `nonconformant`, `error`; or `not run`."""
        return self.found.verdict if self.found is not None else "not run"


def jobs(count: int) -> int:
    """How many releases to run at a time: one per core, at most as many as fit into memory."""
    try:
        free = (
            int(
                next(
                    line
                    for line in Path("/proc/meminfo").read_text().splitlines()
                    if line.startswith("MemAvailable")
                ).split()[1]
            )
            * 1024
        )
    except (OSError, StopIteration):
        free = 2 * MEMORY
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(count, cores, free // MEMORY))


def run(
    places: Sequence[Place],
    settings: Settings,
    spec: Spec,
    folder: Path,
    *,
    at_once: int,
    snapshots: bool,
    all_runs: bool,
    tell: Callable[[Release], None],
) -> list[Release]:
    """All releases, in the order of `places`. Writes below `folder`; `tell` hears of each release when it is done, from any thread."""

    def one(place: Place) -> Release:
        release = Release(place.release, problem=place.problem)
        if place.python is not None:
            began = time.monotonic()
            note = folder / f"{place.release}.note"
            out = _observe(
                place,
                release,
                Job(settings=settings, note=note, snapshots=snapshots, all_runs=all_runs),
                folder,
            )
            _read(release, out, settings, spec, all_runs=all_runs)
            release.seconds = round(time.monotonic() - began, 1)
        tell(release)
        return release

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, places))


def _observe(place: Place, release: Release, job: Job, folder: Path) -> Path:
    """Start the process until it has come to its end, or died too often. Returns the file of its lines."""
    out, job_file, log = (
        folder / f"{place.release}.{name}" for name in ("jsonl", "job.json", "log")
    )
    out.unlink(missing_ok=True)
    job_file.write_text(job.model_dump_json(), encoding="utf-8")
    command = [str(place.python), "-m", "kvconform.versions.observe", str(job_file), str(out)]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        **job.settings.env,
    }  # without a seed, older releases hash blocks at random
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
        if (
            not started or started[-1] in finished or started[-1] in release.deaths
        ):  # not in a run: the next one would end as it did
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or [
                f"status {status}"
            ]
            release.problem = f"the process ended before it was done: {last[0][:300]}"
            return out
        release.deaths.append(started[-1])
        if job.note.exists():
            job.note.replace(folder / f"{place.release}.{len(release.deaths)}.note")
    release.problem = (
        f"the connector ended the process {DEATHS + 1} times, last in {release.deaths[-1]}"
    )
    return out


def _read(release: Release, out: Path, settings: Settings, spec: Spec, *, all_runs: bool) -> None:
    """Fill in `release` from the lines, and give its verdict as kvconform run would on these runs."""
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
        if line["type"] == "run" and line["variant"] not in collector.variants:
            release.problem = (
                f"{line['variant']} is not selected any more: kvconform was changed during the run"
            )
        elif line["type"] == "run":
            variant = collector.variants[line["variant"]]
            said = {row["requirement"]: Row.from_dict(row) for row in line["rows"]}
            rows = [
                said.get(name)
                or new_row(
                    spec.requirements[name],
                    variant,
                    strict=settings.strict,
                    verdict=Verdict(verdict),
                )
                for name, verdict in line["verdicts"].items()
            ]
            collector.put(variant.id, rows)
            collector.capabilities = collector.capabilities or line["capabilities"]
            collector.sources = collector.sources or line["sources"]
            if line["harness_error"]:
                last = line["harness_error"].strip().splitlines()[-1]
                release.harness.setdefault(last, []).append(variant.id)
            collector.notes[variant.id] = CaseNotes(
                variant.id, line["unmet"], harness_error=line["harness_error"]
            )
            release.hooks[variant.id], release.engine[variant.id] = line["hooks"], line["engine"]
        elif line["type"] == "snapshot" and "texts" in line:
            release.snapshots[line["variant"]] = line["texts"]
        elif line["type"] == "snapshot":
            release.no_snapshot[line["variant"]] = line["problem"]
    for number, name in enumerate(release.deaths, 1):
        note = read_note(out.parent / f"{release.release}.{number}.note")
        if name not in collector.variants:
            continue
        rows = crash.rows_of(
            note, collector.variants[name], spec, selection, collector.capabilities, settings.strict
        )
        collector.put(name, rows)
    if not collector.rows:
        return
    rows, release.found = collector.finish(date.today(), complete=not collector.missing())
    for row in rows:
        name = row.run
        release.verdicts.setdefault(name, {})[row.requirement] = row.verdict.value
        if (
            row.verdict is Verdict.FAIL
            or row.verdict is Verdict.ERROR
            and not any(name in runs for runs in release.harness.values())
        ):
            release.messages.setdefault(row.requirement, f"{name}, step {row.step}: {row.message}")
