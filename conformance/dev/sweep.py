# SPDX-License-Identifier: Apache-2.0
"""Search for false alarms: correct but unusual connectors (refimpl/variants/) on all cases.

`python -m kvconform.dev.sweep --seeds 20` runs them on all engines and schedulings, and prints
every requirement that one of them fails. Cases that start processes take seconds each, and are left
out without `--processes`. All connectors on all runs take 20 minutes a seed. With `--share 8` every
seed makes an eighth of the runs, a different eighth each time.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from kvconform.config.limits import in_seconds
from kvconform.config.target import Target
from kvconform.contract.case import SLOW, Case, Device, Variant
from kvconform.contract.loader import load_spec
from kvconform.contract.steps import forks
from kvconform.dev.defects import specification
from kvconform.errors import KvconformError, UsageError, did_you_mean
from kvconform.execute.answers import Death
from kvconform.execute.choice import Choice, executor, parse
from kvconform.execute.work import Calls
from kvconform.files import scratch_root
from kvconform.run.case import run_and_judge
from kvconform.run.records import Run

BAD = ("FAIL", "ERROR", "XPASS")
PAUSE = 15.0
"""Seconds between two lines of progress."""
PROCESSES = {"hash-seed", "second-process"}
HANGS = 30.0
"""Seconds after which a hook counts as one that never returns."""
HOST_ONLY = {"threads"}
"""Variants that are correct in host memory only.

On a GPU their threads use the default stream, which is not the one that vLLM computes on.
"""
SLOW_BUT_RIGHT = (
    "streams.hooks-do-not-wait",
    "streams.start-does-not-wait",
    "streams.layer-by-layer",
)
"""Recommendations that connectors which copy through host memory do not follow on a GPU."""


@dataclass(frozen=True)
class Alarm:
    """A requirement that a correct connector failed, or an error of the harness."""

    connector: str
    seed: int
    run: str
    requirement: str
    message: str

    def __str__(self) -> str:
        message = " ".join(self.message.split())[:300]
        return f"{self.connector}  seed {self.seed}  {self.run}  {self.requirement}: {message}"


@dataclass
class Tally:
    """Outcome of runs: how many were made, how many of those were unsupported, and alarms."""

    runs: int = 0
    unsupported: int = 0
    alarms: list[Alarm] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add the outcome of other runs."""
        self.runs += other.runs
        self.unsupported += other.unsupported
        self.alarms += other.alarms


@dataclass(frozen=True)
class Turn:
    """A piece of work: one run of each connector, with a seed. They share the baseline runs."""

    seed: int
    variant: Variant
    names: tuple[str, ...]


def starts_processes(case: Case) -> bool:
    """Return whether a run of the case starts another Python process, which imports vLLM."""
    return bool(PROCESSES & set(case.relations)) or any(forks(step) for step in case.steps)


def target_of(name: str, device: Device = "cpu") -> Target:
    """Return the named variant as a target; every run has a store of its own."""
    from kvconform.refimpl.variants.registry import STREAMED, VARIANTS

    connector, options = (VARIANTS | STREAMED)[name]
    return Target(connector, {"store": "{tmp}/store", **options}, device=device)


def judge_one(name: str, turn: Turn, tmp: Path, plain: dict[str | None, Run], tally: Tally) -> None:
    """Make one run of one connector, and count it in `tally`.

    `plain` caches baseline runs of the variant, by kv_role.
    """
    from kvconform.refimpl.variants.registry import NOT_RECOMMENDED, STREAMED

    report = run_and_judge(
        turn.variant,
        target_of(name, "emulated" if turn.variant.slow else "cpu"),
        specification(),
        seed=turn.seed,
        tmp=tmp,
        plain=plain,
    )
    tally.runs += 1
    tally.unsupported += all(row.verdict == "UNSUPPORTED" for row in report.rows)
    if report.harness_error:
        last = report.harness_error.strip().splitlines()[-1]
        tally.alarms.append(Alarm(name, turn.seed, turn.variant.id, "harness", last))
        return
    bad = [row for row in report.rows if row.verdict in BAD and row.kind == "requirement"]
    bad = [row for row in bad if row.requirement not in SLOW_BUT_RIGHT or name in STREAMED]
    bad = [row for row in bad if row.requirement != NOT_RECOMMENDED.get(name)]
    tally.alarms += [
        Alarm(name, turn.seed, turn.variant.id, row.requirement, row.finding) for row in bad
    ]


def judge(turn: Turn) -> Tally:
    """Make the runs of a turn in this process."""
    from kvconform.process import watchdog

    tally = Tally()
    plain: dict[str | None, Run] = {}
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as tmp:
        watchdog.start(HANGS)
        try:
            for name in turn.names:
                judge_one(name, turn, Path(tmp) / name, plain, tally)
        finally:
            watchdog.stop()
    return tally


def turns(
    names: list[str], variants: list[Variant], seeds: Iterable[int], share: int = 1
) -> Iterator[Turn]:
    """Yield the work, seed by seed.

    Only one run in `share` is made with a seed; the next seed makes others.
    """
    for seed in seeds:
        for variant in variants[seed % share :: share]:
            yield Turn(seed, variant, tuple(names))


def sweep(work: Iterable[Turn], where: Choice, jobs: int | None) -> Iterator[tuple[int, Tally]]:
    """Run everything, and yield (seed, its tally).

    Prints alarms as they come, and how far it is every PAUSE seconds.
    """
    printed = time.monotonic()
    with executor(where, Calls(judge), "sweep", jobs) as workers:
        for seed, done in groupby(workers.run(work), lambda each: each[0].seed):
            tally = Tally()
            for turn, answer in done:
                found = _died(turn, answer) if isinstance(answer, Death) else answer
                print(*found.alarms, sep="\n", end="\n" if found.alarms else "", flush=True)
                tally.add(found)
                if time.monotonic() - printed > PAUSE:
                    printed = time.monotonic()
                    print(f"seed {seed}: {tally.runs} runs, {len(tally.alarms)} alarms", flush=True)
            yield seed, tally


def _died(turn: Turn, death: Death) -> Tally:
    """Return the outcome of runs that ended their process."""
    said = f"the process ended {death}"
    alarm = Alarm(" or ".join(turn.names), turn.seed, turn.variant.id, "process.died", said)
    return Tally(runs=len(turn.names), alarms=[alarm])


def _until(end: float | None, seeds: range) -> Iterator[int]:
    """Yield seeds until the time `end`, by time.monotonic; at least one."""
    for number, seed in enumerate(seeds):
        if number and end is not None and time.monotonic() > end:
            return
        yield seed


def main(
    seeds: Annotated[int, typer.Option(help="number of seeds")] = 1,
    first_seed: Annotated[int, typer.Option(help="the first seed")] = 0,
    variant: Annotated[list[str] | None, typer.Option(help="only these connectors")] = None,
    case: Annotated[list[str] | None, typer.Option(help="only these cases")] = None,
    processes: Annotated[bool, typer.Option(help="also the cases that start processes")] = False,
    share: Annotated[
        int, typer.Option(min=1, help="make one run in SHARE with every seed, others each time")
    ] = 1,
    emulate_cuda: Annotated[
        bool,
        typer.Option(help="run on an emulated CUDA device, with the connectors that use streams"),
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(help="start no further seed after this time")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="the same in seconds, instead of --minutes")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="workers; default: one per CPU")] = None,
    where: Annotated[
        str | None,
        typer.Option("--executor", help="processes, here, or a Ray cluster (docs/scale.md)"),
    ] = None,
) -> None:
    """Print every failure of correct but unusual connectors, on all cases."""
    from kvconform.refimpl.variants.registry import STREAMED, VARIANTS

    try:
        limit = in_seconds(minutes, seconds)
        choice = parse(where)
    except UsageError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(error.code)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    spec = load_spec()
    for kind, given, known in (
        ("case", case or [], [*spec.cases]),
        ("variant", variant or [], [*VARIANTS, *STREAMED]),
    ):
        for name in (each for each in given if each not in known):
            print(f"error: there is no {kind} {name!r}{did_you_mean(name, known)}", file=sys.stderr)
            sys.exit(2)
    start = time.monotonic()
    alarms = 0
    chosen = [
        each
        for each in spec.cases.values()
        if (not case or each.id in case) and (processes or not starts_processes(each))
    ]
    if not chosen:
        print("error: these cases start processes; --processes runs them", file=sys.stderr)
        sys.exit(2)
    slow = SLOW if emulate_cuda else None
    runs = [run for each in chosen for run in each.variants(["reference", "vllm"], slow=slow)]
    names = [*VARIANTS]
    if variant:
        names = variant
    elif emulate_cuda:
        names = [*(name for name in VARIANTS if name not in HOST_ONLY), *STREAMED]
    each_runs = f"{len(runs)} runs each (1 in {share} per seed)"
    cases = f"{len(chosen)} of {len(spec.cases)} cases"
    print(f"{len(names)} connectors, {cases}, {each_runs}, {seeds} seeds", flush=True)
    end = None if limit is None else start + limit
    coming = turns(names, runs, _until(end, range(first_seed, first_seed + seeds)), share)
    try:
        for seed, tally in sweep(coming, choice, jobs):
            judged = f"{tally.runs - tally.unsupported} of {tally.runs} runs judged"
            counts = f"{judged}, the others unsupported; {len(tally.alarms)} alarms"
            print(f"seed {seed}: {counts}, {time.monotonic() - start:.0f} s", flush=True)
            alarms += len(tally.alarms)
    except KvconformError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(error.code)
    sys.exit(int(bool(alarms)))


if __name__ == "__main__":
    # Workers find its functions and classes by the name of the module, which is not `__main__`.
    typer.run(importlib.import_module("kvconform.dev.sweep").main)
