# SPDX-License-Identifier: Apache-2.0
"""What it costs to look at every byte: steps of the reference engine with and without verification, in one process, in turns."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from kvconform.load import load_spec
from kvconform.oracle import Oracle
from kvconform.runner import run_variant
from kvconform.settings import REFERENCE
from kvconform.target import Target
from kvconform.worker import Worker

CASES = ("placeholders.many-requests", "placeholders.conversation", "preemption.many")


def measure(rounds: int = 8) -> dict[str, Any]:
    """CPU seconds of the same runs with and without verification (what was written by whom, what is read), the best of `rounds` each,
    and by how much verification adds to them."""
    spec = load_spec()
    declared = {"store": True, "saves": "all", "chunk_tokens": 4}
    target = Target(REFERENCE, {"store": "memory:{tmp}"}, capabilities=declared)
    variants = [variant for name in CASES for variant in spec.cases[name].variants(["reference"], ["async"])]

    def once() -> float:
        with tempfile.TemporaryDirectory(prefix="kvconform-") as tmp:
            began = time.process_time()
            for number, variant in enumerate(variants):
                run_variant(variant, target, seed=0, tmp=Path(tmp) / str(number))
            return time.process_time() - began

    check, read = Oracle.check_writes, Worker.read_layer
    best = {True: float("inf"), False: float("inf")}
    once()
    try:
        for _ in range(rounds):
            for verified in (True, False):
                Oracle.check_writes = check if verified else lambda self, after_hook: None  # type: ignore[method-assign]
                Worker.read_layer = read if verified else lambda self, layer: None  # type: ignore[method-assign]
                best[verified] = min(best[verified], once())
    finally:
        Oracle.check_writes, Worker.read_layer = check, read  # type: ignore[method-assign]
    return {"with": best[True], "without": best[False], "verification adds, %": 100 * (best[True] / best[False] - 1)}
