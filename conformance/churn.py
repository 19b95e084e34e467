# SPDX-License-Identifier: Apache-2.0
"""Ten thousand short requests through one engine: `python -m kvconform.churn [CONNECTOR] [REQUESTS]`. Too long for the gate.

What they leave behind is judged like every run: blocks, Request objects, threads, and an engine that comes to rest.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvconform.case import Case, Variant
from kvconform.errors import UsageError
from kvconform.load import load_spec
from kvconform.run import run_and_judge
from kvconform.target import Target

REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
WAVE = 250
"""Requests that are there at once. Every wave repeats a part of the wave before, aborts some of it and preempts some."""

JUDGED = ("end.baseline", "run.quiesces", "lifecycle.threads-end", "hook.no-raise", "hook.terminates", "compose.null-effect", "events.once")


def churn_case(requests: int) -> Case:
    """The case: waves of short requests, each wave with repeats of the one before, an abort and a preemption."""
    steps: list[dict[str, Any]] = []
    for start in range(0, requests, WAVE):
        count = min(WAVE, requests - start)
        steps += [{"add": {"req": f"w{start}_{n}", "prompt": 5 + n % 9, "max_tokens": 1 + n % 3}} for n in range(count - count // 5)]
        for n in range(count // 5):
            source = {"same": f"w{start - WAVE}_{n}"} if start else 9
            steps.append({"add": {"req": f"r{start}_{n}", "prompt": source, "max_tokens": 2}})
        steps += [{"step": 2}, {"abort": f"w{start}_1"}, {"preempt": f"w{start}_0"}, {"run": {}}, {"drop-local": {}}]
    config = {"num_blocks": 512, "max_seqs": 64, "budget": 512}
    raw = {"id": "internal.churn", "area": "internal", "text": "Many short requests.", "config": config, "relations": [], "steps": steps}
    return Case.model_validate(raw, strict=False)


def churn(target: Target, requests: int = 10_000, engine: str = "vllm", scheduling: str = "async") -> dict[str, Any]:
    """Run it once. Seconds, and for each requirement in JUDGED that was at stake its verdict."""
    variant = Variant(churn_case(requests), engine, scheduling, "v1", 2 if scheduling == "async" else 1, 4)
    spec, began = load_spec(), time.perf_counter()
    with tempfile.TemporaryDirectory() as tmp:
        report = run_and_judge(variant, target, spec, seed=0, tmp=Path(tmp) / "run", requirements=JUDGED)
    verdicts = {row["requirement"]: row["verdict"] for row in report.rows if row["verdict"] != "UNOBSERVABLE"}
    messages = [row["message"] for row in report.rows if row["verdict"] == "FAIL"]
    return {"seconds": round(time.perf_counter() - began, 1), "error": report.harness_error, "failed": messages, **verdicts}


def main(
    connector: Annotated[str, typer.Argument(help="package.module:Class, or a name registered in vLLM")] = REFERENCE,
    requests: Annotated[int, typer.Argument(help="how many")] = 10_000,
    extra_config: Annotated[str, typer.Option(help="JSON; {tmp} is a directory of the run's own")] = "",
) -> None:
    """Many short requests through one engine, and what they leave behind; exit 1 if it is anything."""
    extra = json.loads(extra_config) if extra_config else {"store": "{tmp}/store"} if connector == REFERENCE else {}
    try:
        found = churn(Target(connector, extra), requests)
    except UsageError as error:
        print(f"kvconform: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    for name, value in found.items():
        print(f"{name:24} {value}")
    raise typer.Exit(int(bool(found["error"] or found["failed"])))


if __name__ == "__main__":
    typer.run(main)
