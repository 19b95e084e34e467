# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the gate and of exploration on the reference connector: `python -m kvconform.dev.bench [--every N]`.

Machines and their loads differ, so compare the shares and the ratios within one run; the seconds only give them a size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kvconform.contract.loader import load_spec
from kvconform.files import scratch_root

if TYPE_CHECKING:
    from kvconform.explore.workload import Workload

CONNECTOR = "kvconform.refimpl.connector:ReferenceConnector"
CORES = 2
"""What the bar is about: 200 workloads per second on two cores."""
ROUNDS = 5
ENGINES = ("reference", "vllm")


class Stopwatch:
    """Seconds by phase, in the order in which the phases first began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to `phase`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


@dataclass
class Gate:
    """Result of one measured gate: times, and runs per engine."""

    clock: Stopwatch = field(default_factory=Stopwatch)
    runs: dict[str, int] = field(default_factory=dict)


def measure_gate(every: int) -> Gate:
    """Run every `every`-th variant on each engine with all the runs that it is compared with, judge them, and write a report."""
    gate = Gate()
    clock = gate.clock
    with clock("specification"):
        spec = load_spec()
        requirements = list(spec.requirements.values())
    with clock("import vLLM"):
        from kvconform.compat import vllm_api
        from kvconform.config.target import Target
        from kvconform.judge.verdict import judge
        from kvconform.run.calibration import target_profile
        from kvconform.run.records import Run
        from kvconform.run.runner import run_variant
    with clock("first configuration"):
        vllm_api.build_config(
            block_size=4,
            num_blocks=8,
            budget=64,
            max_seqs=4,
            max_model_len=256,
            prefix_caching=True,
            spec_tokens=0,
            scheduling="sync",
            runner="v1",
            policy="fcfs",
            transfer=None,
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = Target(CONNECTOR, {"store": "{tmp}"})
        with clock("capabilities"):
            profile = target_profile(target, folder / "profile")
        for engine in ENGINES:
            variants = [
                v
                for case in spec.cases.values()
                if case.unmet(profile.caps) is None
                for v in case.variants([engine])
            ][::every]
            for number, variant in enumerate(variants):
                runs: dict[str, Run] = {}
                with clock(f"{engine}: runs"):
                    for relation in ("connector", *variant.case.relations):
                        runs[relation] = run_variant(
                            variant,
                            target,
                            seed=0,
                            tmp=folder / f"{engine}-{number}-{relation}",
                            relation=relation,
                            caps=profile.caps,
                            promises=profile.promises,
                        )
                with clock(f"{engine}: requirements"):
                    rows = judge(requirements, runs, profile.caps)
                with (
                    clock("report"),
                    (folder / "report.jsonl").open("a", encoding="utf-8") as report,
                ):
                    report.writelines(json.dumps(row.to_dict()) + "\n" for row in rows)
                gate.runs[engine] = gate.runs.get(engine, 0) + len(runs)
    return gate


def show(gate: Gate, every: int) -> None:
    """Print the phases with their shares, and the ratios."""
    seconds = gate.clock.seconds
    total = sum(seconds.values())
    print("One process, every variant:" if every == 1 else f"One process, one variant in {every}:")
    for phase, spent in seconds.items():
        print(f"  {phase:<24}{spent:8.2f} s {100 * spent / total:6.1f} %")
    print(f"  {'total':<24}{total:8.2f} s")
    per_run = {}
    for engine, runs in gate.runs.items():
        spent = seconds[f"{engine}: runs"]
        per_run[engine] = spent / runs
        ratio = seconds[f"{engine}: requirements"] / spent
        print(
            f"  {engine}: {runs} runs, {runs / spent:.0f} per second; judging takes {ratio:.2f} x the time of the runs"
        )
    print(
        f"  a run on vllm takes {per_run['vllm'] / per_run['reference']:.2f} x the time of one on reference"
    )


def loop_ms() -> float:
    """Milliseconds of processor time of a fixed piece of Python: calls, small dicts, attributes, as a workload is made of."""
    began = time.process_time()
    kept: dict[int, tuple[int, str]] = {}
    for number in range(60_000):
        kept[number % 97] = max(number, 7), str(number)
    assert len(kept) == 97
    return 1000 * (time.process_time() - began)


def explore(count: int = 100) -> dict[str, float]:
    """Milliseconds of processor time per workload, to draw it and for the rest (with a reference connector that stores in memory, and with
    one that stores in files), how many times a fixed loop the first is, and what two cores would do in a second at that pace; what two
    processes of a campaign do in a second of wall time; how many workloads hit what was stored; how many failed (must be 0). The workloads
    are those of `explore --profile small`. Of several rounds the median, each beside a loop of its own: the machine may change its pace."""
    _workloads(1)  # imports
    began = time.process_time()
    workloads = _workloads(count)
    drawing = 1000 * (time.process_time() - began) / count
    memory, files = (_Rounds(store, workloads) for store in ("memory:{tmp}", "{tmp}"))
    each = memory.milliseconds + drawing
    return {
        "draw_ms": drawing,
        "workload_ms": each,
        "times_the_loop": memory.loops,
        "per_second_on_2_cores": 1000 * CORES / each,
        "in_files_ms": files.milliseconds + drawing,
        "campaign_per_second": campaign(),
        "hits": memory.hits,
        "failed": memory.failed + files.failed,
    }


def _workloads(count: int) -> list[Workload]:
    from kvconform.explore.draw import small

    return list(small(["reference"], ["sync", "async"], None, first_seed=0, count=count))


class _Rounds:
    """Several rounds of the same workloads, in this process. `milliseconds` of a workload and how many `loops` that is, medians; `hits` and
    `failed` workloads of a round."""

    def __init__(self, store: str, workloads: list[Workload]) -> None:
        from kvconform.config.target import Target
        from kvconform.contract.loader import load_spec
        from kvconform.explore.outcome import outcome
        from kvconform.observe.probe import Patch

        spec, target = load_spec(), Target(CONNECTOR, {"store": store})
        rounds: list[tuple[float, float]] = []  # ms of a workload, of the loop
        hits = failed = 0
        with (
            tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as name,
            Patch.parking(),
        ):  # as a campaign's process does
            for workload in workloads:  # what a process does once: imports, and each configuration
                outcome(workload, target, spec, Path(name) / "run")
            for _ in range(ROUNDS):
                loop, began = loop_ms(), time.process_time()
                for workload in workloads:
                    found = outcome(workload, target, spec, Path(name) / "run")
                    failed += bool(found.failures or found.error)
                    hits += "hit" in found.reached
                rounds.append(
                    (1000 * (time.process_time() - began) / len(workloads), (loop + loop_ms()) / 2)
                )
        self.milliseconds = median(workload for workload, _ in rounds)
        self.loops = median(workload / loop for workload, loop in rounds)
        self.hits, self.failed = hits / ROUNDS, failed / ROUNDS


def campaign(count: int = 1000, first: int = 200) -> float:
    """Workloads per second of wall time in which nothing failed, by two processes of a campaign, behind the `first` ones: those start the
    processes."""
    from kvconform.config import settings
    from kvconform.explore.pool import Pool

    options = {"connector": CONNECTOR, "extra_config": {"store": "memory:{tmp}"}}
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as name:
        scratch = Path(name)
        with Pool(settings.load(options, start=scratch), scratch, CORES) as pool:
            outcomes = pool.outcomes(_workloads(first + count))
            for _ in range(first):
                next(outcomes)
            began = time.monotonic()
            failed = sum(bool(found.failures or found.error) for _, found in outcomes)
            return (count - failed) / (time.monotonic() - began)


def starts(rounds: int = 5) -> dict[str, float]:
    """Seconds until the command line has answered, medians of `rounds`, beside a bare start of the same Python."""
    commands = {
        "python_s": ["-c", "pass"],
        "help_s": ["-m", "kvconform", "--help"],
        "list_s": ["-m", "kvconform", "list"],
    }
    found: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
            found[name].append(time.perf_counter() - began)
    return {name: median(seconds) for name, seconds in found.items()}


def main(arguments: list[str] | None = None) -> int:
    """Print all benchmarks; returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvconform.dev.bench", description=__doc__)
    parser.add_argument(
        "--every", type=int, default=4, metavar="N", help="run one variant in N (default: 4)"
    )
    every = max(1, parser.parse_args(arguments).every)
    gate = measure_gate(every)
    show(gate, every)
    for title, found in (
        ("Random workloads of profile small on engine reference", explore()),
        ("Command line", starts()),
    ):
        print(f"\n{title}:")
        for name, value in found.items():
            print(f"  {name:<24}{value:12.3f}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("kvconform: interrupted")
