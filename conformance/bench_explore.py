# SPDX-License-Identifier: Apache-2.0
"""What a random workload costs, drawn, run and judged in this one process: `python -m kvconform.bench_explore`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from kvconform.files import scratch_root

CONNECTOR = "kvconform.refimpl.connector:ReferenceConnector"
CORES = 2
"""What the bar is about: 200 workloads per second on two cores."""


def measure(count: int = 100) -> dict[str, float]:
    """Milliseconds of processor time per workload, to draw it and for the rest, and what two cores would do in a second if nothing else
    ran there; how many workloads hit what was stored; how many failed (must be 0). The workloads are those of `explore --profile small`."""
    from kvconform.explore.draw import small
    from kvconform.explore.outcome import outcome
    from kvconform.load import load_spec
    from kvconform.target import Target

    spec, target = load_spec(), Target(CONNECTOR, {"store": "{tmp}"})
    began = time.process_time()
    workloads = list(small(["reference"], ["sync", "async"], None, first_seed=0, count=count))
    drawing = time.process_time() - began
    hits = failed = 0
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as name:
        for workload in workloads:  # what a process does once: imports, and each configuration
            outcome(workload, target, spec, Path(name) / "run")
        began = time.process_time()
        for workload in workloads:
            found = outcome(workload, target, spec, Path(name) / "run")
            failed += bool(found.failures or found.error)
            hits += "hit" in found.reached
        running = time.process_time() - began
    each = 1000 * (drawing + running) / count
    return {
        "draw_ms": 1000 * drawing / count,
        "workload_ms": each,
        "per_second_on_2_cores": 1000 * CORES / each,
        "hits": hits,
        "failed": failed,
    }


def main() -> int:
    for name, value in measure().items():
        print(f"{name:<24}{value:12.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
