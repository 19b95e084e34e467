# SPDX-License-Identifier: Apache-2.0
"""Share of a step of the engine that it takes to compare the KV in the cache.

`python -m kvconform.gpu.steps --device cuda --into FILE.json` runs a case with the reference
connector on engine `reference`, and prints the result. The device is waited for before and after
each comparison and each step, so both times have the device's work, and none of what it does
otherwise at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, cast

from kvconform.contract.case import Device
from kvconform.contract.loader import load_spec
from kvconform.emulation.patch import Patches
from kvconform.files import scratch_root

CASE = "cache.turnover"
ROUNDS = 3
"""Runs of the case, after one that compiles; the one with the quickest steps counts."""


class Timed:
    """Calls of a method and their seconds; the device is waited for before and after each."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.calls = 0
        self.seconds = 0.0
        self._wait = wait

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method with its time taken."""

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._wait()
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._wait()
                self.seconds += time.perf_counter() - began
                self.calls += 1

        return timed


def measure(device: Device, case: str = CASE) -> dict[str, float]:
    """Return `steps`, `step_ms` (milliseconds of a step), `compare_ms`, and the `share` of it."""
    import torch

    from kvconform.config.settings import REFERENCE
    from kvconform.config.target import Target
    from kvconform.engine.executor import Executor
    from kvconform.kv.access import Tensors
    from kvconform.run.case import run_and_judge

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    spec = load_spec()
    variant = spec.cases[case].variants(("reference",), ("sync",), None)[0]
    target = Target(REFERENCE, {"store": "memory:{tmp}"}, device=device)
    found = []
    with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as tmp:
        for number in range(1 + ROUNDS):
            steps, compared = Timed(wait), Timed(wait)
            patches = Patches()
            patches.set(Executor, "execute", steps.around(Executor.execute))
            patches.set(Tensors, "differing", compared.around(Tensors.differing))
            try:
                report = run_and_judge(variant, target, spec, seed=0, tmp=Path(tmp) / str(number))
            finally:
                patches.restore()
            if report.harness_error:
                raise RuntimeError(report.harness_error)
            found.append((steps.seconds / steps.calls, compared.seconds / steps.calls, steps.calls))
    step, compare, count = min(found[1:])
    return {
        "steps": count,
        "step_ms": round(1000 * step, 3),
        "compare_ms": round(1000 * compare, 3),
        "share": round(compare / step, 3),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the result and write it to a file."""
    parser = argparse.ArgumentParser(prog="kvconform.gpu.steps", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda", "emulated"), required=True)
    parser.add_argument("--into", type=Path, required=True, metavar="FILE.json")
    given = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    text = json.dumps(measure(cast(Device, given.device)))
    given.into.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
