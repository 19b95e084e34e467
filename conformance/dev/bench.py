# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the gate and of exploration on the reference connector.

`python -m kvconform.dev.bench [--every N] [--boundary] [--codecs] [--pressure]` prints it. Machines
and their loads differ, so compare shares and ratios within one run; the seconds only show the order
of magnitude. The exit status is 1 if the boundary takes 1 % of a step or more, or if a cache under
pressure loses or damages something. `--pressure` needs a Redis server, and only runs if asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kvconform.contract.loader import load_spec
from kvconform.dev import boundary, pressure
from kvconform.files import scratch_root

if TYPE_CHECKING:
    from kvconform.explore.workload import Workload

CONNECTOR = "kvconform.refimpl.connector:ReferenceConnector"
CORES = 2
"""Number of cores that the goal is set for: 200 workloads per second on two cores."""
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
    """Run every `every`-th variant on each engine, judge it, and write a report.

    Each variant is run with all the runs that it is compared with.
    """
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
        vllm_api.build_config(block_size=4, num_blocks=8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = Target(CONNECTOR, {"store": "{tmp}"})
        with clock("capabilities"):
            profile = target_profile(target, folder / "profile")
        for engine in ENGINES:
            variants = [
                variant
                for case in spec.cases.values()
                if case.unmet(profile.caps) is None
                for variant in case.variants([engine])
            ]
            for number, variant in enumerate(variants[::every]):
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
        pace = f"{runs} runs, {runs / spent:.0f} per second"
        print(f"  {engine}: {pace}; judging takes {ratio:.2f} x the time of the runs")
    ratio = per_run["vllm"] / per_run["reference"]
    print(f"  a run on vllm takes {ratio:.2f} x the time of one on reference")


def loop_ms() -> float:
    """Return the milliseconds of processor time that a fixed loop takes.

    Like a workload it consists of calls, small dicts and strings.
    """
    began = time.process_time()
    kept: dict[int, tuple[int, str]] = {}
    for number in range(60_000):
        kept[number % 97] = max(number, 7), str(number)
    assert len(kept) == 97
    return 1000 * (time.process_time() - began)


def explore(count: int = 100) -> dict[str, float]:
    """Measure exploration with `count` workloads of `explore --profile small`.

    Returns, by name:
    - `draw_ms`: milliseconds of processor time to draw a workload;
    - `workload_ms`, `in_files_ms`: milliseconds of processor time for a workload, drawing included,
      with a reference connector that stores in memory or in files;
    - `times_the_loop`: time of a workload in memory, without drawing, as a multiple of `loop_ms`;
    - `per_second_on_2_cores`: workloads in memory that two cores complete in a second at that pace;
    - `campaign_per_second`: workloads per second of wall time in a campaign of two processes;
    - `hits`, `failed`: workloads that hit stored KV, and workloads that failed (must be 0).

    Times are medians of several rounds. Each round measures its own loop, because the machine may
    change its pace.
    """
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
    from kvconform.explore.draw import drawn

    modes = ["sync", "async"]
    return list(drawn(["reference"], modes, None, first_seed=0, count=count, simple=True))


class _Rounds:
    """Several rounds of the same workloads, in this process.

    `milliseconds` is the median time of a workload, `loops` the same as a multiple of `loop_ms`.
    `hits` and `failed` count workloads of a round.
    """

    def __init__(self, store: str, workloads: list[Workload]) -> None:
        from kvconform.config.target import Target
        from kvconform.contract.loader import load_spec
        from kvconform.explore.outcome import outcome

        spec = load_spec()
        target = Target(CONNECTOR, {"store": store})
        rounds: list[tuple[float, float]] = []  # milliseconds of a workload, and of the loop
        hits = 0
        failed = 0
        with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as name:
            # Warm up: imports and configurations take time only once per process.
            for workload in workloads:
                outcome(workload, target, spec, Path(name) / "run")
            for _ in range(ROUNDS):
                loop = loop_ms()
                began = time.process_time()
                for workload in workloads:
                    found = outcome(workload, target, spec, Path(name) / "run")
                    failed += bool(found.failures or found.error)
                    hits += "hit" in found.reached
                spent = 1000 * (time.process_time() - began) / len(workloads)
                rounds.append((spent, (loop + loop_ms()) / 2))
        self.milliseconds = median(workload for workload, _ in rounds)
        self.loops = median(workload / loop for workload, loop in rounds)
        self.hits = hits / ROUNDS
        self.failed = failed / ROUNDS


def campaign(count: int = 1000, first: int = 200) -> float:
    """Return the workloads per second of wall time that two processes of a campaign pass.

    The `first` workloads do not count, because they start the processes.
    """
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
    """Return the seconds that commands take, as medians of `rounds`.

    A bare start of the same Python is measured for comparison.
    """
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


def codecs() -> dict[str, float]:
    """Measure the codecs (`kvconform.dev.codecs`)."""
    from kvconform.dev.codecs import measure

    return measure()


def main(arguments: list[str] | None = None) -> int:
    """Print the benchmarks and return the exit status: 1 if one of them misses its bar."""
    parser = argparse.ArgumentParser(prog="kvconform.dev.bench", description=__doc__)
    parser.add_argument(
        "--every", type=int, default=4, metavar="N", help="run one variant in N (default: 4)"
    )
    parser.add_argument(
        "--boundary", action="store_true", help="only what the placeholder boundary adds to a step"
    )
    parser.add_argument(
        "--codecs", action="store_true", help="only the reference connector's codecs"
    )
    parser.add_argument(
        "--pressure", action="store_true", help="only two engines over bounded levels and Redis"
    )
    chosen = parser.parse_args(arguments)
    alone: dict[str, tuple[str, Callable[[], dict[str, float]]]] = {
        "boundary": ("The placeholder boundary in a step of vLLM", boundary.measure),
        "codecs": ("Codecs, a layer of 256 tokens in bfloat16", codecs),
        "pressure": ("Two engines over bounded levels, one of them on Redis", pressure.measure),
    }
    named = [name for name in alone if getattr(chosen, name)]
    benchmarks = [alone[name] for name in named or ("boundary", "codecs")]
    if not named:
        every = max(1, chosen.every)
        show(measure_gate(every), every)
        benchmarks += [
            ("Random workloads of profile small on engine reference", explore),
            ("Command line", starts),
        ]
    problems: list[str] = []
    for title, measure in benchmarks:
        found = measure()
        print(f"\n{title}:")
        for name, value in found.items():
            print(f"  {name:<24}{value:12.3f}")
        problems += boundary.problems(found) + pressure.problems(found)
    for problem in problems:
        print(f"kvconform: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("kvconform: interrupted")
