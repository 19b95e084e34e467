# SPDX-License-Identifier: Apache-2.0
"""Tests of connectors whose inspectors show a part of what an inspector may show."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.judge.records import CaseReport
from kvconform.run.case import run_and_judge


def judged(name: str, tmp: Path) -> CaseReport:
    spec = load_spec()
    variant = spec.cases["cache.demoted"].variants(["reference"], ["sync"])[0]
    target = Target(
        f"shown_rig:{name}",
        {"store": "{tmp}/store"},
        capabilities={"store": True, "saves": "all", "best_effort": False},
    )
    return run_and_judge(variant, target, spec, seed=0, tmp=tmp)


@pytest.mark.parametrize(
    ("name", "shown", "hidden"),
    [
        ("CacheOnly", "tiers.bounded", "save.plan-bound"),
        ("PlansOnly", "save.plan-bound", "tiers.bounded"),
    ],
)
def test_what_is_not_shown_is_unobservable(
    name: str, shown: str, hidden: str, tmp_path: Path
) -> None:
    report = judged(name, tmp_path)
    assert report.harness_error is None
    verdicts = {row.requirement: row.verdict for row in report.rows}
    assert (verdicts[shown], verdicts[hidden]) == ("PASS", "UNOBSERVABLE")
    assert not {"FAIL", "ERROR"} & set(verdicts.values())
