# SPDX-License-Identifier: Apache-2.0
"""Compare the reference scheduler with vLLM's for any number of steps.

`python tests/rigs/fidelity.py --steps 1000000 --state fidelity.json`

The workloads are those of scheduler_workloads.py, different ones for each batch. `--state` saves
the place, so that a later run continues from there. A difference is printed as Hypothesis shrank
it, and ends the campaign.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from scheduler_rig import difference
from scheduler_workloads import play, workloads

BATCH = 100
"""Workloads of one seed."""


def batch(number: int) -> tuple[int, int]:
    """Return (steps, compared entries) of one batch.

    Raises AssertionError, with a small workload, where the schedulers differ.
    """
    steps = entries = 0

    @seed(number)
    @settings(
        max_examples=BATCH,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(workloads())
    def same(workload: tuple[Any, list[Any]]) -> None:
        nonlocal steps, entries
        ours, theirs = (play(engine, *workload) for engine in ("reference", "vllm"))
        found = difference(ours.trace, theirs.trace)
        assert not found, f"{found}\n{workload}"
        steps, entries = steps + ours.steps, entries + len(ours.trace)

    same()
    return steps, entries


def main(arguments: list[str] | None = None) -> int:
    """0 if nothing differed, 1 if something did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps",
        type=int,
        default=1_000_000,
        help="of the reference scheduler, with those of earlier runs",
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--state", type=Path, help="file that keeps the place")
    given_ = parser.parse_args(arguments)
    found: dict[str, int] = {"batches": 0, "steps": 0, "entries": 0}
    if given_.state is not None and given_.state.exists():
        found = json.loads(given_.state.read_text())
    end = time.monotonic() + 60 * given_.minutes
    warnings.simplefilter("ignore")
    while found["steps"] < given_.steps and time.monotonic() < end:
        try:
            steps, entries = batch(found["batches"])
        except AssertionError:
            traceback.print_exc()
            return 1
        found = {
            "batches": found["batches"] + 1,
            "steps": found["steps"] + steps,
            "entries": found["entries"] + entries,
        }
        if given_.state is not None:
            given_.state.write_text(json.dumps(found))
        print(
            (
                f"{found['steps']} steps, {found['entries']} entries, {found['batches'] * BATCH} "
                "workloads: equal"
            ),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
