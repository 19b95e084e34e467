# SPDX-License-Identifier: Apache-2.0
"""Many concurrent requests through the reference engine with the reference connector: nothing may be lost, no byte may be wrong."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from kvconform.case import Case, Variant
from kvconform.kernels.codes import CodeBook
from kvconform.runner import run_variant
from kvconform.target import Target


def stress(requests: int = 1000, prompt: int = 200, output: int = 64, scheduling: str = "async") -> dict[str, Any]:
    """Run the workload once; returns seconds, steps and what went wrong (all of these must be 0 or empty)."""
    block = 16
    per_request = (prompt + output) // block + 2
    case = Case.model_validate(
        {
            "id": "bench.stress",
            "area": "bench",
            "text": "Many requests at once.",
            "config": {
                "block_size": block,
                "num_blocks": requests * per_request + 1,
                "budget": 16384,
                "max_seqs": requests,
                "max_model_len": 2 * (prompt + output),
            },
            "steps": [{"add": {"req": "r", "count": requests, "prompt": prompt, "max_tokens": output}}, {"run": {}}],
        },
        strict=False,
    )
    variant = Variant(case, "reference", scheduling, "v1", 2 if scheduling == "async" else 1, block)
    target = Target("kvconform.refimpl.connector:ReferenceConnector", {"store": "memory:{tmp}"})
    with tempfile.TemporaryDirectory() as tmp:
        began = time.perf_counter()
        run = run_variant(variant, target, seed=0, tmp=Path(tmp) / "run", book=CodeBook(1, 1, 16))
        seconds = time.perf_counter() - began
    end = next(e for e in run.trace if e["k"] == "run.end")
    finished = [e for e in run.trace if e["k"] == "req.finished"]
    return {
        "requests": requests,
        "seconds": round(seconds, 2),
        "steps": max(e["step"] for e in run.trace),
        "tokens": sum(e["k"] == "sample" for e in run.trace),
        "lost": requests - len({e["req"] for e in finished if e["status"] == "FINISHED_LENGTH_CAPPED"}),
        "unfinished": end["unfinished"],
        "wrong_bytes": sum(e["k"] == "kv.wrong" for e in run.trace),
        "corrupt_tokens": sum(e["k"] == "sample" and not e["clean"] for e in run.trace),
        "leaked_blocks": end["free_blocks_at_start"] - end["free_blocks"],
        "harness_error": run.harness_error,
    }
