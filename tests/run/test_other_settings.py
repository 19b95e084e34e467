# SPDX-License-Identifier: Apache-2.0
"""Tests of restarts over the same store with other options of the connector, or other blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvconform.config.target import Target
from kvconform.contract.capabilities import common, complete
from kvconform.contract.case import Case
from kvconform.contract.loader import load_spec
from kvconform.errors import UsageError
from kvconform.judge.records import CaseReport
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.run.case import run_and_judge
from kvconform.run.runner import run_variant

SPEC = load_spec()
REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
STORE = {"store": "{tmp}/store"}
SETTINGS = SPEC.cases["identity.other-settings"]
BLOCKS = SPEC.cases["identity.other-block-size"]
RANKS = SPEC.cases["ranks.more-ranks"]


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


def _wrong(extra: dict[str, Any]) -> dict[str, Any]:
    if "codec" not in extra:
        return {"store": True}
    if extra["codec"] == "int8":
        raise LookupError("no such codec")
    return {"chunk_tokens": None}


class DeclaresWrongly(ReferenceConnector):
    """Declares no capabilities for some of its options."""

    kvconform_capabilities = staticmethod(_wrong)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("codec", "sentence"),
    [
        ("int8", "kvconform_capabilities raised LookupError: no such codec"),
        ("int4", "chunk_tokens"),
    ],
)
def test_a_wrong_declaration_for_other_options_is_a_sentence(
    codec: str, sentence: str, tmp_path: Path
) -> None:
    target = Target(
        f"{__name__}:DeclaresWrongly", STORE, extra_config_after_restart={"codec": codec}
    )
    with pytest.raises(UsageError, match=rf"^\[extra_config_after_restart\]: .*{sentence}"):
        run_and_judge(SETTINGS.variants(["reference"])[0], target, SPEC, seed=0, tmp=tmp_path / "r")


WIDE = {
    "area": "groups",
    "text": "A first group with larger blocks.",
    "engines": ["vllm"],
    "matrix": {"scheduling": ["sync"]},
}


@pytest.mark.parametrize(
    "raw",
    [
        {
            "config": {"groups": ["wide", "full"]},
            "steps": [
                {"add": {"req": "a", "prompt": 18}},
                {"run": {}},
                {"restart": {"block_size": 8}},
                {"add": {"req": "b", "prompt": {"same": "a"}}},
                {"run": {}},
            ],
        },
        {
            "config": {
                "groups": ["wide", "full"],
                "engines": {"p": "kv_both", "d": {"role": "kv_both", "dtype": "float16"}},
            },
            "steps": [
                {"add": {"req": "a", "prompt": 18}},
                {"run": {}},
                {"on": "d"},
                {"add": {"req": "b", "prompt": {"same": "a"}}},
                {"run": {}},
            ],
        },
    ],
    ids=["restarts", "engines"],
)
def test_the_block_size_is_that_of_the_first_group(raw: dict[str, Any], tmp_path: Path) -> None:
    case = Case.model_validate({"id": "x.wide", **WIDE, **raw})
    target = Target("kvconform.refimpl.variants.hybrid:HybridConnector", STORE)
    report = run_and_judge(case.variants(["vllm"])[0], target, SPEC, seed=0, tmp=tmp_path / "run")
    assert report.rows and not failed(report)
    own = {e["kind"]: e for e in report.trace or () if e["kind"] in ("run.changed", "run.engines")}
    if "restart" in str(raw):
        assert own["run.changed"]["block_size"] == 16
    else:
        assert own["run.engines"]["own"]["d"]["block_size"] == 8


def test_a_restart_may_have_more_ranks(tmp_path: Path) -> None:
    [variant] = RANKS.variants(["reference"])
    report = run_and_judge(variant, Target(REFERENCE, STORE), SPEC, seed=0, tmp=tmp_path / "run")
    assert report.rows and not failed(report)
    trace = report.trace or ()
    (changed,) = [e for e in trace if e["kind"] == "run.changed"]
    halves = [e["kind"] for e in trace].count("kv.registered")
    assert (trace[0]["ranks"], changed["ranks"], halves) == (1, 2, 3)


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
