# SPDX-License-Identifier: Apache-2.0
"""The search for known-bad connectors without their cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvconform.explore import defects


def test_a_defect_is_found_by_what_it_breaks_and_made_small() -> None:
    found = defects.search("saves-unknown-token", 60.0, 0, True)
    assert found.found == "save.plan-bound" and found.left_out is None
    case = json.loads(found.case or "")
    assert found.requests == sum("add" in step for step in case["steps"]) <= 2


def test_a_recommendation_counts() -> None:
    assert defects.search("unlogged-statistics", 60.0, 0, False).found == "stats.logged"


def test_who_finds_nothing_in_time_says_so() -> None:
    found = defects.search("loads-over-local-prefix", 0.01, 0, False)
    assert found.found is None and found.left_out is None and found.workloads < 3
    assert defects.summarise([found]) == 1


@pytest.mark.parametrize(("name", "why"), [("coroutine-hook", "in the class or in vLLM itself"), ("kills-process", "may end the process")])
def test_what_no_workload_can_show_is_left_out(name: str, why: str) -> None:
    found = defects.search(name, 60.0, 0, False)
    assert found.found is None and found.left_out is not None and why in found.left_out
    assert defects.summarise([found]) == 0, "neither found nor missed"


def test_an_unknown_defect_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert defects.main(["nobody-knows-this", "--out", str(tmp_path / "o")]) == 2
    assert "there is no defect 'nobody-knows-this'" in capsys.readouterr().err
