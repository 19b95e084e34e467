# SPDX-License-Identifier: Apache-2.0
"""What a random workload costs, drawn, run and judged: `python -m kvconform.bench_explore`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kvconform.files import scratch_root

if TYPE_CHECKING:
    from kvconform.explore.workload import Workload

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
        from kvconform.explore.outcome import outcome
        from kvconform.load import load_spec
        from kvconform.probe import Patch
        from kvconform.target import Target

        spec, target = load_spec(), Target(CONNECTOR, {"store": store})
        rounds: list[tuple[float, float]] = []  # ms of a workload, of the loop
        hits = failed = 0
        with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as name, Patch.parking():  # as a campaign's process does
            for workload in workloads:  # what a process does once: imports, and each configuration
                outcome(workload, target, spec, Path(name) / "run")
            for _ in range(ROUNDS):
                loop, began = loop_ms(), time.process_time()
                for workload in workloads:
                    found = outcome(workload, target, spec, Path(name) / "run")
                    failed += bool(found.failures or found.error)
                    hits += "hit" in found.reached
                rounds.append((1000 * (time.process_time() - began) / len(workloads), (loop + loop_ms()) / 2))
        self.milliseconds = median(workload for workload, _ in rounds)
        self.loops = median(workload / loop for workload, loop in rounds)
        self.hits, self.failed = hits / ROUNDS, failed / ROUNDS


def campaign(count: int = 1000, first: int = 200) -> float:
    """Workloads per second of wall time in which nothing failed, by two processes of a campaign, behind the `first` ones: those start the
    processes."""
    from kvconform import settings
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


def main() -> int:
    for name, value in measure().items():
        print(f"{name:<24}{value:12.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
