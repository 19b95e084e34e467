# SPDX-License-Identifier: Apache-2.0
"""Looks for false alarms: correct but unusual connectors (`refimpl/variants/`) on all cases, engines, schedulings, and many seeds.

`python -m kvconform.dev.sweep --seeds 20` prints every requirement that one of them fails. Cases that start processes of their own take seconds
each; they are left out unless asked for. All connectors on all runs take 20 minutes a seed; with `--share 8` every seed has an eighth of
the runs, another one each time.
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

from kvconform.config.target import Target
from kvconform.contract.case import SLOW, Case, Device, Variant
from kvconform.contract.loader import Spec, load_spec
from kvconform.files import scratch_root
from kvconform.run.calibration import target_profile
from kvconform.run.case import run_and_judge
from kvconform.run.records import Run

BAD = ("FAIL", "ERROR", "XPASS")
PROCESSES = {"hash-seed", "second-process"}
HOST_ONLY = {"threads"}
"""Right in host memory and wrong on a GPU: its threads work on the default stream, which is not the one that vLLM computes on."""
SLOW_BUT_RIGHT = "streams.hooks-do-not-wait"
"""What connectors that copy through the host's memory do not follow on a GPU; a recommendation."""


@dataclass(frozen=True)
class Alarm:
    """A requirement that a correct connector failed, or an error of the harness."""

    connector: str
    seed: int
    run: str
    requirement: str
    message: str

    def __str__(self) -> str:
        return f"{self.connector}  seed {self.seed}  {self.run}  {self.requirement}: {' '.join(self.message.split())[:300]}"


@dataclass
class Tally:
    """What a sweep did: runs per connector, alarms, and how many runs passed something that gates."""

    runs: Counter[str] = field(default_factory=Counter)
    unsupported: Counter[str] = field(default_factory=Counter)
    alarms: list[Alarm] = field(default_factory=list)


def starts_processes(case: Case) -> bool:
    """Whether a run of the case starts another Python process, which imports vLLM."""
    return bool(PROCESSES & set(case.relations)) or any(
        step.op == "restart" and step.arg == "process" for step in case.steps
    )


def target_of(name: str, device: Device = "cpu") -> Target:
    """The named variant, with a store of each run's own."""
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
    """One run of one connector, into the tally. `plain`: the same run without connector, by kv_role, if it was made already."""
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
    tally.unsupported[name] += all(row["verdict"] == "UNSUPPORTED" for row in report.rows)
    if report.harness_error:
        tally.alarms.append(
            Alarm(name, seed, variant.id, "harness", report.harness_error.strip().splitlines()[-1])
        )
        return
    bad = [
        row
        for row in report.rows
        if row["verdict"] in BAD and row.get("kind", "requirement") == "requirement"
    ]
    bad = [row for row in bad if row["requirement"] != SLOW_BUT_RIGHT or name in STREAMED]
    tally.alarms += [
        Alarm(name, seed, variant.id, row["requirement"], row.get("message") or "") for row in bad
    ]


def sweep(
    names: list[str], variants: list[Variant], spec: Spec, seeds: range, tmp: Path, share: int = 1
) -> Iterator[tuple[int, Tally]]:
    """Run everything (or one run in `share`, others with every seed), seed by seed; yields the tally of each seed. Writes below `tmp`."""
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
    seeds: Annotated[int, typer.Option(help="how many seeds")] = 1,
    first_seed: Annotated[int, typer.Option(help="the first of them")] = 0,
    variant: Annotated[list[str] | None, typer.Option(help="only these connectors")] = None,
    case: Annotated[list[str] | None, typer.Option(help="only these cases")] = None,
    processes: Annotated[bool, typer.Option(help="also the cases that start processes")] = False,
    share: Annotated[
        int, typer.Option(min=1, help="with every seed only one run in so many, others each time")
    ] = 1,
    emulate_cuda: Annotated[
        bool, typer.Option(help="on an emulated CUDA device, also those with streams of their own")
    ] = False,
    minutes: Annotated[float, typer.Option(help="no further seed after this time")] = 1e9,
) -> None:
    """Correct but unusual connectors on every case, engine and scheduling: whatever one of them fails is printed."""
    from kvconform.process import watchdog
    from kvconform.refimpl.variants.registry import STREAMED, VARIANTS

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    spec, start, alarms = load_spec(), time.monotonic(), 0
    chosen = [
        c
        for c in spec.cases.values()
        if (not case or c.id in case) and (processes or not starts_processes(c))
    ]
    runs = [
        each
        for c in chosen
        for each in c.variants(["reference", "vllm"], slow=SLOW if emulate_cuda else None)
    ]
    names = variant or (
        [*(name for name in VARIANTS if name not in HOST_ONLY), *STREAMED]
        if emulate_cuda
        else [*VARIANTS]
    )
    print(
        f"{len(names)} connectors, {len(chosen)} of {len(spec.cases)} cases, {len(runs)} runs each (1 in {share} per seed), {seeds} seeds",
        flush=True,
    )
    watchdog.start(30.0)
    try:
        with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as tmp:
            for seed, tally in sweep(
                names, runs, spec, range(first_seed, first_seed + seeds), Path(tmp), share
            ):
                print(*tally.alarms, sep="\n", end="\n" if tally.alarms else "")
                supported = sum(tally.runs.values()) - sum(tally.unsupported.values())
                seconds = time.monotonic() - start
                print(
                    f"seed {seed}: {supported} runs judged, {len(tally.alarms)} alarms, {seconds:.0f} s",
                    flush=True,
                )
                alarms += len(tally.alarms)
                if seconds > 60 * minutes:
                    break
    finally:
        watchdog.stop()
    sys.exit(int(bool(alarms)))


if __name__ == "__main__":
    typer.run(main)
