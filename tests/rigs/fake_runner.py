# SPDX-License-Identifier: Apache-2.0
"""A stand-in for kvconform.run.case.run_and_judge that needs no vLLM.

The connector's extra configuration defines what happens. `fail`: {requirement: [case, ...]};
`bugs`: {guarantee: [known bug that explains its failure, ...]}; `exit`, `hang`, `raise`,
`foreign`: [case, ...]. Everything else passes.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from kvconform.config.settings import Settings
from kvconform.contract.events import lifecycle
from kvconform.contract.loader import Spec
from kvconform.errors import UsageError
from kvconform.judge.foreign import ForeignKV
from kvconform.judge.records import CaseReport, Verdict
from kvconform.judge.verdict import rows_for
from kvconform.process import watchdog


def judge(
    variant: Any,
    target: Settings,
    spec: Spec,
    *,
    tmp: Path,
    requirements: list[str],
    strict: bool,
    **_: Any,
) -> CaseReport:
    """Return the report of a connector with this configuration."""
    orders: dict[str, Any] = target.extra_config
    case = variant.case.id
    if "usage" in orders:
        raise UsageError(orders["usage"])
    if case in orders.get("foreign", []):
        raise ForeignKV("the store is shared")
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
    excerpts: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        row.exercised, row.message = 1, None
        if case in orders.get("fail", {}).get(row.requirement, []):
            row.verdict, row.count, row.step, row.req, row.event = Verdict.FAIL, 1, 2, "a", 5
            row.message = f"wrong bytes in {tmp}/store by <object at 0x7f00deadbeef>"
            row.bugs = tuple(orders.get("bugs", {}).get(row.requirement, ()))
            row.evidence = "v1/core.py: Scheduler.schedule"
            stall = {"kind": "engine.stall", "seq": 5, "step": 2}
            excerpts[row.requirement] = [
                {**stall, "steps": 60, "limit": 2.0, "threads": 0, "waiting_on": ["a"]}
            ]
    return CaseReport(
        variant.id,
        rows=rows,
        unmet=["preempted: a"] if case in orders.get("unmet", []) else [],
        excerpts=excerpts,
        capabilities={"store": True, "saves": "all"},
        sources={"store": "declared", "saves": "inferred"},
        trace=[{"kind": "engine.lifecycle", "seq": 0, "step": 0, **lifecycle("start")}],
    )
