# SPDX-License-Identifier: Apache-2.0
"""Search for false alarms: correct but unusual connectors (refimpl/variants/) on all cases.

`python -m kvconform.dev.sweep --seeds 20` runs them on all engines and schedulings, and prints
every requirement that one of them fails. Cases that start processes take seconds each, and are left
out without `--processes`. All connectors on all runs take 20 minutes a seed. With `--share 8` every
seed makes an eighth of the runs, a different eighth each time.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from kvconform.config.limits import in_seconds
from kvconform.config.target import Target
from kvconform.contract.case import SLOW, Case, Device, Variant
from kvconform.contract.loader import Spec, load_spec
from kvconform.contract.steps import forks
from kvconform.errors import UsageError
from kvconform.files import scratch_root
from kvconform.run.calibration import target_profile
from kvconform.run.case import run_and_judge
from kvconform.run.records import Run

BAD = ("FAIL", "ERROR", "XPASS")
PROCESSES = {"hash-seed", "second-process"}
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
    """Outcome of a sweep: runs per connector, runs that were unsupported, and alarms."""

    runs: Counter[str] = field(default_factory=Counter)
    unsupported: Counter[str] = field(default_factory=Counter)
    alarms: list[Alarm] = field(default_factory=list)


def starts_processes(case: Case) -> bool:
    """Return whether a run of the case starts another Python process, which imports vLLM."""
    return bool(PROCESSES & set(case.relations)) or any(forks(step) for step in case.steps)


def target_of(name: str, device: Device = "cpu") -> Target:
    """Return the named variant as a target; every run has a store of its own."""
    from kvconform.refimpl.variants.registry import STREAMED, VARIANTS

    connector, options = (VARIANTS | STREAMED)[name]
    return Target(connector, {"store": "{tmp}/store", **options}, device=device)


def judge_one(
    name: str,
    variant: Variant,
    spec: Spec,
    seed: int,
    tmp: Path,
    plain: dict[str | None, Run],
    tally: Tally,
) -> None:
    """Make one run of one connector, and count it in `tally`.

    `plain` caches baseline runs of the variant, by kv_role.
    """
    from kvconform.refimpl.variants.registry import STREAMED

    report = run_and_judge(
        variant,
        target_of(name, "emulated" if variant.slow else "cpu"),
        spec,
        seed=seed,
        tmp=tmp,
        plain=plain,
    )
    tally.runs[name] += 1
    tally.unsupported[name] += all(row.verdict == "UNSUPPORTED" for row in report.rows)
    if report.harness_error:
        last = report.harness_error.strip().splitlines()[-1]
        tally.alarms.append(Alarm(name, seed, variant.id, "harness", last))
        return
    bad = [row for row in report.rows if row.verdict in BAD and row.kind == "requirement"]
    bad = [row for row in bad if row.requirement not in SLOW_BUT_RIGHT or name in STREAMED]
    tally.alarms += [Alarm(name, seed, variant.id, row.requirement, row.finding) for row in bad]


def sweep(
    names: list[str], variants: list[Variant], spec: Spec, seeds: range, tmp: Path, share: int = 1
) -> Iterator[tuple[int, Tally]]:
    """Run everything, seed by seed, and yield (seed, its tally). Writes below `tmp`.

    Only one run in `share` is made with a seed; the next seed makes others.
    """
    for name in names:
        target_profile(target_of(name, "emulated" if variants[0].slow else "cpu"), tmp / "profiles")
    for seed in seeds:
        tally = Tally()
        for number, variant in enumerate(variants[seed % share :: share]):
            plain: dict[str | None, Run] = {}
            for name in names:
                judge_one(name, variant, spec, seed, tmp / f"{seed}-{number}-{name}", plain, tally)
        yield seed, tally


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
) -> None:
    """Print every failure of correct but unusual connectors, on all cases."""
    from kvconform.process import watchdog
    from kvconform.refimpl.variants.registry import STREAMED, VARIANTS

    try:
        limit = in_seconds(minutes, seconds)
    except UsageError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(error.code)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    spec = load_spec()
    start = time.monotonic()
    alarms = 0
    chosen = [
        each
        for each in spec.cases.values()
        if (not case or each.id in case) and (processes or not starts_processes(each))
    ]
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
    watchdog.start(30.0)
    try:
        with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as tmp:
            for seed, tally in sweep(
                names, runs, spec, range(first_seed, first_seed + seeds), Path(tmp), share
            ):
                print(*tally.alarms, sep="\n", end="\n" if tally.alarms else "")
                supported = sum(tally.runs.values()) - sum(tally.unsupported.values())
                taken = time.monotonic() - start
                counts = f"{supported} runs judged, {len(tally.alarms)} alarms"
                print(f"seed {seed}: {counts}, {taken:.0f} s", flush=True)
                alarms += len(tally.alarms)
                if limit is not None and taken > limit:
                    break
    finally:
        watchdog.stop()
    sys.exit(int(bool(alarms)))


if __name__ == "__main__":
    typer.run(main)
