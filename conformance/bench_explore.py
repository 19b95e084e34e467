# SPDX-License-Identifier: Apache-2.0
"""What a random workload costs, drawn, run and judged in this one process: `python -m kvconform.bench_explore`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from kvconform.files import scratch_root

CONNECTOR = "kvconform.refimpl.connector:ReferenceConnector"
CORES = 2
"""What the bar is about: 200 workloads per second on two cores."""
ROUNDS = 5


def loop_ms() -> float:
    """Milliseconds of processor time of a fixed piece of Python: calls, small dicts, attributes, as a workload is made of."""
    began = time.process_time()
    kept: dict[int, tuple[int, str]] = {}
    for number in range(60_000):
        kept[number % 97] = max(number, 7), str(number)
    assert len(kept) == 97
    return 1000 * (time.process_time() - began)


def measure(count: int = 100) -> dict[str, float]:
    """Milliseconds of processor time per workload, to draw it and for the rest, how many times a fixed loop that is, and what two cores
    would do in a second if nothing else ran there; how many workloads hit what was stored; how many failed (must be 0). The workloads are
    those of `explore --profile small`. Of several rounds the median, each beside a loop of its own: the machine may change its pace."""
    from kvconform.explore.draw import small
    from kvconform.explore.outcome import outcome
    from kvconform.load import load_spec
    from kvconform.probe import Patch
    from kvconform.target import Target

    spec, target = load_spec(), Target(CONNECTOR, {"store": "{tmp}"})
    began = time.process_time()
    workloads = list(small(["reference"], ["sync", "async"], None, first_seed=0, count=count))
    drawing = time.process_time() - began
    hits = failed = 0
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as name, Patch.parking():  # as in a campaign's processes
        for workload in workloads:  # what a process does once: imports, and each configuration
            outcome(workload, target, spec, Path(name) / "run")
        rounds: list[tuple[float, float]] = []  # ms of a workload, of the loop
        for _ in range(ROUNDS):
            loop, began = loop_ms(), time.process_time()
            for workload in workloads:
                found = outcome(workload, target, spec, Path(name) / "run")
                failed += bool(found.failures or found.error)
                hits += "hit" in found.reached
            rounds.append((1000 * (time.process_time() - began) / count, (loop + loop_ms()) / 2))
    each = median(workload for workload, _ in rounds) + 1000 * drawing / count
    return {
        "draw_ms": 1000 * drawing / count,
        "workload_ms": each,
        "times_the_loop": median(workload / loop for workload, loop in rounds),
        "per_second_on_2_cores": 1000 * CORES / each,
        "hits": hits / ROUNDS,
        "failed": failed,
    }


def main() -> int:
    for name, value in measure().items():
        print(f"{name:<24}{value:12.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
