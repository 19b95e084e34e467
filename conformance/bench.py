# SPDX-License-Identifier: Apache-2.0
"""Where the time of a warm gate goes, measured on the reference connector in this one process: `python -m kvconform.bench [--every N]`.

Machines and their loads differ, so what counts are the shares and the ratios within one run; the seconds are there to give them a size.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvconform.load import load_spec

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


def measure_gate(every: int, clock: Stopwatch) -> dict[str, float]:
    """Run every `every`-th variant of every case on each engine, judge it and write it as a report; fills `clock`.

    Returns {engine: runs per second of driving}. The runs include the one without the connector that `relate` requirements need.
    """
    with clock("specification"):
        spec = load_spec()
    with clock("import vLLM"):
        from kvconform import compat
        from kvconform.run import Run, run_variant
        from kvconform.target import Target
        from kvconform.verdict import judge
    with clock("first configuration"):
        compat.build_config(
            block_size=4, num_blocks=8, budget=64, max_seqs=4, max_model_len=256, prefix_caching=True, spec_tokens=0, scheduling="sync",
            runner="v1", policy="fcfs", transfer=None,
        )  # fmt: skip
    target, requirements = Target(CONNECTOR, {"store": "{tmp}"}), list(spec.requirements.values())
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "report.jsonl").open("w", encoding="utf-8") as report:
        for engine in ENGINES:
            variants = [variant for case in spec.cases.values() for variant in case.variants([engine])][::every]
            made = 0
            for number, variant in enumerate(variants):
                runs: dict[str, Run] = {}
                for relation in ("connector", "no-connector"):
                    with clock(f"{engine}: runs"):
                        tmp = Path(folder) / f"{engine}-{number}-{relation}"
                        runs[relation] = run_variant(variant, target, seed=0, tmp=tmp, relation=relation)
                    made += 1
                with clock(f"{engine}: requirements"):
                    rows = judge(requirements, runs, runs["connector"].caps)
                with clock("report"):
                    write(report, rows)
            rates[engine] = made / max(clock.seconds.get(f"{engine}: runs", 0.0), 1e-9)
    return rates


def write(report: Any, rows: list[Any]) -> None:
    """One line of JSON per row, as report.jsonl has them."""
    import json

    report.writelines(json.dumps(row.to_dict()) + "\n" for row in rows)


def show(clock: Stopwatch, rates: dict[str, float], every: int) -> None:
    """Print the phases with their shares, and the ratios."""
    total = sum(clock.seconds.values())
    print(f"One process, every {every}. variant:" if every > 1 else "One process, every variant:")
    for phase, seconds in clock.seconds.items():
        print(f"  {phase:<24}{seconds:8.2f} s {100 * seconds / total:6.1f} %")
    print(f"  {'total':<24}{total:8.2f} s")
    for engine, rate in rates.items():
        judged = clock.seconds.get(f"{engine}: requirements", 0.0) / max(clock.seconds.get(f"{engine}: runs", 0.0), 1e-9)
        print(f"  {engine}: {rate:.0f} runs/s; judging takes {judged:.2f} x the time of the runs")
    print(f"  vllm / reference: {rates['reference'] / rates['vllm']:.2f} x the time per run")


def main(arguments: list[str] | None = None) -> int:
    """Print all benchmarks; returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvconform.bench", description=__doc__)
    parser.add_argument("--every", type=int, default=4, metavar="N", help="run every N-th variant (default: 4)")
    options = parser.parse_args(arguments)
    clock = Stopwatch()
    show(clock, measure_gate(max(1, options.every), clock), options.every)
    for module, function, title in (
        ("kvconform.bench_scheduler", "compare", "Reference scheduler against vLLM's"),
        ("kvconform.bench_monitors", "measure", "Requirements"),
    ):
        print(f"\n{title}:")
        if importlib.util.find_spec(module) is None:
            print(f"  {module} is missing")
            continue
        found = getattr(importlib.import_module(module), function)()
        for line in describe(found):
            print(f"  {line}")
    return 0


def describe(found: Any) -> list[str]:
    """Lines for what a benchmark returned: a map, a list of lines, a text, or nothing when it printed by itself."""
    if found is None:
        return []
    if isinstance(found, dict):
        return [f"{name}: {value:.3g}" if isinstance(value, float) else f"{name}: {value}" for name, value in found.items()]
    return found.splitlines() if isinstance(found, str) else [str(line) for line in found]


if __name__ == "__main__":
    sys.exit(main())
