# SPDX-License-Identifier: Apache-2.0
"""Where the time of a warm gate goes, measured on the reference connector in this one process: `python -m kvconform.bench [--every N]`.

Machines and their loads differ, so what counts are the shares and the ratios within one run; the seconds are there to give them a size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvconform.load import load_spec
from kvconform.requirement import Requirement

CONNECTOR = "kvconform.refimpl.connector:ReferenceConnector"
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
    """What one measured gate came to: runs made per engine, and all the events of the runs with the connector."""

    clock: Stopwatch = field(default_factory=Stopwatch)
    runs: dict[str, int] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    requirements: list[Requirement] = field(default_factory=list)
    caps: dict[str, Any] = field(default_factory=dict)


def measure_gate(every: int) -> Gate:
    """Run every `every`-th variant on each engine with all the runs that it is compared with, judge them, and write a report."""
    gate = Gate()
    clock = gate.clock
    with clock("specification"):
        spec = load_spec()
        gate.requirements = list(spec.requirements.values())
    with clock("import vLLM"):
        from kvconform import compat
        from kvconform.run import Run, run_variant, target_profile
        from kvconform.target import Target
        from kvconform.verdict import judge
    with clock("first configuration"):
        compat.build_config(
            block_size=4, num_blocks=8, budget=64, max_seqs=4, max_model_len=256, prefix_caching=True, spec_tokens=0, scheduling="sync",
            runner="v1", policy="fcfs", transfer=None,
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = Target(CONNECTOR, {"store": "{tmp}"})
        with clock("capabilities"):
            profile = target_profile(target, folder / "profile")
        gate.caps = profile.caps
        for engine in ENGINES:
            variants = [v for case in spec.cases.values() if case.unmet(profile.caps) is None for v in case.variants([engine])][::every]
            for number, variant in enumerate(variants):
                runs: dict[str, Run] = {}
                with clock(f"{engine}: runs"):
                    for relation in ("connector", *variant.case.relations):
                        runs[relation] = run_variant(
                            variant, target, seed=0, tmp=folder / f"{engine}-{number}-{relation}", relation=relation, caps=profile.caps,
                            promises=profile.promises,
                        )  # fmt: skip
                with clock(f"{engine}: requirements"):
                    rows = judge(gate.requirements, runs, profile.caps)
                with clock("report"), (folder / "report.jsonl").open("a", encoding="utf-8") as report:
                    report.writelines(json.dumps(row.to_dict()) + "\n" for row in rows)
                gate.runs[engine] = gate.runs.get(engine, 0) + len(runs)
                gate.events += runs["connector"].trace
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
        print(f"  {engine}: {runs} runs, {runs / spent:.0f} per second; judging takes {ratio:.2f} x the time of the runs")
    print(f"  a run on vllm takes {per_run['vllm'] / per_run['reference']:.2f} x the time of one on reference")


def main(arguments: list[str] | None = None) -> int:
    """Print all benchmarks; returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvconform.bench", description=__doc__)
    parser.add_argument("--every", type=int, default=4, metavar="N", help="run one variant in N (default: 4)")
    every = max(1, parser.parse_args(arguments).every)
    gate = measure_gate(every)
    show(gate, every)
    from kvconform import bench_explore, bench_monitors, bench_scheduler, bench_stress, bench_verify

    for title, found in (
        ("Requirements, on the events of these runs", bench_monitors.measure(gate.events, gate.requirements, gate.caps)),
        ("Reference scheduler against vLLM's", bench_scheduler.compare()),
        ("Verification, in a step of the reference engine", bench_verify.measure()),
        ("A thousand requests at once", bench_stress.stress()),
        ("Random workloads, small ones on engine reference", bench_explore.measure()),
    ):
        print(f"\n{title}:")
        for name, value in found.items():
            print(f"  {name:<24}{value:12.3f}" if isinstance(value, float) else f"  {name:<24}{value!s:>12}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("kvconform: interrupted")
