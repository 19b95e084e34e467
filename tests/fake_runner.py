# SPDX-License-Identifier: Apache-2.0
"""A stand-in for kvconform.run.case.run_and_judge that needs no vLLM: the connector's extra configuration says what happens.

`fail`: {requirement: [case, ...]}, `exit`, `hang`, `raise`: [case, ...]. Everything else passes.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvconform.config.settings import Settings
from kvconform.contract.loader import Spec
from kvconform.errors import UsageError
from kvconform.judge.verdict import Verdict, rows_for
from kvconform.process import watchdog
from kvconform.report.html.story import story_of


def judge(
    variant: Any,
    target: Settings,
    spec: Spec,
    *,
    tmp: Path,
    requirements: list[str],
    strict: bool,
    **_: Any,
) -> SimpleNamespace:
    """What a connector with this configuration would have come to."""
    orders: dict[str, Any] = target.extra_config
    case = variant.case.id
    if "usage" in orders:
        raise UsageError(orders["usage"])
    if case in orders.get("raise", []):
        raise RuntimeError("a bug of the harness")
    with watchdog.hook("get_finished", step=3):
        if case in orders.get("exit", []):
            os._exit(1)
        if case in orders.get("hang", []):
            while True:
                with contextlib.suppress(watchdog.HookTimeout):
                    time.sleep(60)
    rows = rows_for(
        [spec.requirements[name] for name in requirements], variant, Verdict.PASS, "", strict=strict
    )
    timelines = {}
    for row in rows:
        row.exercised, row.message = 1, None
        if case in orders.get("fail", {}).get(row.requirement, []):
            row.verdict, row.count, row.step, row.req, row.event = Verdict.FAIL, 1, 2, "a", 5
            row.message, row.evidence = (
                f"wrong bytes in {tmp}/store by <object at 0x7f00deadbeef>",
                "v1/core.py: Scheduler.schedule",
            )
            timelines[row.requirement] = [
                {
                    "kind": "engine.stall",
                    "seq": 5,
                    "step": 2,
                    "steps": 60,
                    "waiting_on": ["a"],
                    "seconds": 0,
                }
            ]
    trace: list[dict[str, Any]] = [
        {"kind": "engine.lifecycle", "seq": 0, "step": 0, "op": "start", "pid": 0, "error": None}
    ]
    return SimpleNamespace(
        rows=[row.to_dict() for row in rows],
        unmet=["preempted: a"] if case in orders.get("unmet", []) else [],
        timelines=timelines,
        harness_error=None,
        capabilities={"store": True, "saves": "all"},
        sources={"store": "declared", "saves": "inferred"},
        trace=trace,
        story=story_of(trace, rows),
    )
