# SPDX-License-Identifier: Apache-2.0
"""Tests of the capability `persistent`: found out by a restart, and asked for by cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.run.calibration import profile_of
from kvconform.run.case import run_and_judge

REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
FILES = {"store": "{tmp}/store"}


class KeepsIndex(ReferenceConnector):
    """Keeps its files, and forgets at every start that they are there."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._store.reset()


@pytest.mark.parametrize(
    ("target", "persistent", "doubt"),
    [
        (Target(REFERENCE, FILES), True, None),
        (Target(REFERENCE, {}), False, None),
        (Target(f"{__name__}:KeepsIndex", FILES), False, None),
        (
            Target("kvconform.refimpl.defects.answers:NoRestart", FILES),
            True,
            "from a restart that broke off: RuntimeError: the store belongs to another instance",
        ),
    ],
)
def test_a_restart_shows_whether_a_store_outlives_the_process(
    target: Target, persistent: bool, doubt: str | None, tmp_path: Path
) -> None:
    profile = profile_of(target, tmp_path)
    assert profile.caps["persistent"] is persistent
    assert profile.sources["persistent"] == "inferred"
    assert profile.doubts.get("persistent") == doubt


@pytest.mark.parametrize("case", ["lifecycle.restart-engine", "lifecycle.restart-process"])
def test_a_store_in_memory_is_not_asked_for_what_a_restart_lost(case: str, tmp_path: Path) -> None:
    spec = load_spec()
    variant = spec.cases[case].variants(["reference"])[0]
    report = run_and_judge(variant, Target(REFERENCE, {}), spec, seed=0, tmp=tmp_path / "run")
    assert {row.verdict for row in report.rows} == {"UNSUPPORTED"} and not report.unmet
    assert (report.rows[0].message or "").startswith("the case needs (persistent): its store")
    kept = run_and_judge(variant, Target(REFERENCE, FILES), spec, seed=0, tmp=tmp_path / "files")
    verdicts = {row.requirement: row.verdict for row in kept.rows}
    assert verdicts["restart.keeps"] == "PASS" and "FAIL" not in verdicts.values()
