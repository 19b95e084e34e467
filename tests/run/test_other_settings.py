# SPDX-License-Identifier: Apache-2.0
"""Tests of restarts over the same store with other options of the connector, or other blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvconform.config.target import Target
from kvconform.contract.capabilities import common, complete
from kvconform.contract.loader import load_spec
from kvconform.judge.records import CaseReport
from kvconform.run.case import run_and_judge
from kvconform.run.runner import run_variant

SPEC = load_spec()
REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
STORE = {"store": "{tmp}/store"}
SETTINGS = SPEC.cases["identity.other-settings"]
BLOCKS = SPEC.cases["identity.other-block-size"]


def report_of(after: dict[str, Any], tmp: Path, **options: Any) -> CaseReport:
    target = Target(REFERENCE, {**STORE, **options}, extra_config_after_restart=after)
    return run_and_judge(SETTINGS.variants(["reference"])[0], target, SPEC, seed=0, tmp=tmp / "run")


def failed(report: CaseReport) -> set[str]:
    assert report.harness_error is None
    return {row.requirement for row in report.rows if row.verdict == "FAIL"}


def test_without_other_options_the_case_is_unsupported(tmp_path: Path) -> None:
    report = report_of({}, tmp_path)
    assert {row.verdict for row in report.rows} == {"UNSUPPORTED"}
    assert "declare no [extra_config_after_restart]" in (report.rows[0].message or "")


@pytest.mark.parametrize("after", [{"codec": "int8"}, {"chunk_tokens": 8}, {"load": "async"}])
def test_other_options_need_not_find_anything(after: dict[str, Any], tmp_path: Path) -> None:
    report = report_of(after, tmp_path)
    assert not failed(report) and not report.unmet
    assert not any(row.risk for row in report.rows)


def test_each_engine_is_judged_by_what_its_options_declare_to_lose(tmp_path: Path) -> None:
    """The first one loses more than the second one may."""
    assert not failed(report_of({"codec": "int8"}, tmp_path, codec="int4"))


def test_options_that_are_refused_over_the_store_are_no_failure(tmp_path: Path) -> None:
    report = report_of({"codec": "none such"}, tmp_path)
    assert {row.verdict for row in report.rows} == {"UNSUPPORTED"}
    message = report.rows[0].message or ""
    assert message.startswith("the connector refuses other options over the same store: codec must")


def test_what_both_promise() -> None:
    caps = complete({"store": True, "kv_events": True, "saves": "all", "chunk_tokens": 4})
    found = common(caps, {"kv_events": False, "saves": "prompt", "chunk_tokens": 8, "lossy": 0.01})
    assert found == {
        **caps,
        "kv_events": False,
        "saves": "prompt",
        "chunk_tokens": 8,
        "lossy": 0.01,
    }
    assert common(caps, {"store": True}) == caps
    assert common({**caps, "best_effort": True}, {"best_effort": False})["best_effort"] is True


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_a_restart_with_other_blocks_is_judged_by_their_size(engine: str, tmp_path: Path) -> None:
    variant = BLOCKS.variants([engine])[0]
    runs = [
        run_variant(variant, Target(REFERENCE, STORE), seed=0, tmp=tmp_path / name)
        for name in ("one", "two")
    ]
    trace = runs[0].trace
    (changed,) = [e for e in trace if e["kind"] == "run.changed"]
    assert (trace[0]["block_size"], changed["block_size"], changed["hash_size"]) == (4, 8, 8)
    shapes = [e["shape"][2] for e in trace if e["kind"] == "kv.registered"]
    assert shapes == [4, 8]
    assert runs[1].trace == trace
