# SPDX-License-Identifier: Apache-2.0
"""Tests that a wrong claim names the request whose KV it is, and shows when that was stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.judge.records import Row
from kvconform.report.causes import by_cause
from kvconform.report.timeline import render
from kvconform.run.case import run_and_judge

pytest.importorskip("vllm")
from core_rig import REFERENCE, ROUND_TRIP, run_case, select

SPEC = load_spec()


def found(case: str, defect: str, requirement: str, tmp: Path) -> tuple[Row, list[str]]:
    """The failure of a requirement, and its excerpt as it is printed."""
    variant = SPEC.cases[case].variants(["reference"], None)[0]
    target = Target(f"kvconform.refimpl.defects.{defect}", {"store": "memory:{tmp}"})
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp)
    (row,) = [row for row in report.rows if row.requirement == requirement]
    assert row.verdict == "FAIL" and row.message is not None
    return row, render(report.excerpts[requirement], row.event)


def test_a_claim_under_another_identity_says_how_the_two_differ(tmp_path: Path) -> None:
    row, lines = found("identity.lora-path", "identity:AdapterByName", "lookup.identity", tmp_path)
    differs = "path of the LoRA adapter ('/adapters/tuesday' for b, '/adapters/monday' for a)"
    assert f"request a begins with the same 14 tokens and differs in the {differs}" in str(
        row.message
    )
    kinds = [line.split()[1:3] for line in lines]
    assert ["plan", "save"] in kinds and ["namesake", "a"] in kinds
    shown = [line.split(maxsplit=2)[2] for line in lines if line.split()[1] == "request"]
    assert shown == [
        "a has LoRA adapter 'tuned' at /adapters/monday",
        "b has LoRA adapter 'tuned' at /adapters/tuesday",
    ]


def test_loaded_kv_of_another_identity_says_how_the_two_differ(tmp_path: Path) -> None:
    row, lines = found("identity.salt-second", "identity:NoSalt", "identity.content", tmp_path)
    assert "request b differs in the cache salt (none for d, 's1' for b)" in str(row.message)
    assert any("request     b has cache salt 's1'" in line for line in lines)


def test_what_differs_tells_causes_apart(tmp_path: Path) -> None:
    salt, _ = found("identity.salt", "identity:NoSalt", "lookup.identity", tmp_path)
    other, _ = found("identity.two-salts", "identity:NoSalt", "lookup.identity", tmp_path)
    adapter, _ = found("identity.lora", "identity:NoAdapter", "lookup.identity", tmp_path)
    both, _ = found("identity.joined-names", "identity:JoinsNames", "lookup.identity", tmp_path)
    assert (salt.differs, adapter.differs) == (("salt",), ("adapter",))
    assert salt.headline == "a hit on KV with another cache salt"
    assert both.headline == "a hit on KV with another cache salt and another LoRA adapter"
    assert by_cause([both, salt, adapter, other]) == [[salt, other, both], [adapter]]


def test_an_image_at_another_place_is_no_other_image(tmp_path: Path) -> None:
    """Request z has another image over the same tokens, and came first."""
    row, _ = found("identity.image-offset", "identity:ImagesAnywhere", "lookup.identity", tmp_path)
    assert "request a begins with the same 18 tokens and differs in the place of" in str(
        row.message
    )


def test_a_claim_of_what_must_not_be_stored_shows_its_save(tmp_path: Path) -> None:
    row, lines = found(
        "lifecycle.skip-save", "forbidden:ForgetsTheVeto", "save.forbidden", tmp_path
    )
    assert "the KV is that of request a, which forbids to store it" in str(row.message)
    (saved,) = [line for line in lines if " plan " in line]
    ended = next(number for number, line in enumerate(lines) if " finished " in line)
    assert "save a [0, 16)" in saved and lines.index(saved) > ended, "it saves when a has ended"


def test_no_namesake_is_looked_for_where_a_claim_is_right(tmp_path: Path) -> None:
    run = run_case(REFERENCE, ROUND_TRIP, tmp_path)
    assert [e["tokens"] for e in select(run.trace, "lookup", req="b")] == [12]
    assert not select(run.trace, "lookup.namesake")


def test_a_request_that_is_alike_is_no_namesake(tmp_path: Path) -> None:
    """Request b has loaded the KV that c asks for; it is a's, whose cache salt is b's adapter."""
    variant = SPEC.cases["identity.adapter-called-salt"].variants(["reference"], None)[0]
    target = Target("kvconform.refimpl.defects.identity:JoinsNames", {"store": "memory:{tmp}"})
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path)
    named = [(e["req"], e["of"]) for e in select(report.trace, "lookup.namesake")]
    assert ("c", "a") in named and all(of == "a" for _, of in named)


def test_a_namesake_is_found_behind_other_events_of_the_lookup(tmp_path: Path) -> None:
    """For a connector that declares to save prompts only, the event lookup.permitted is between."""
    variant = SPEC.cases["identity.salt"].variants(["reference"], None)[0]
    target = Target(
        "kvconform.refimpl.defects.identity:NoSalt",
        {"store": "memory:{tmp}"},
        capabilities={"saves": "prompt"},
    )
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path)
    (row,) = [row for row in report.rows if row.requirement == "lookup.identity"]
    assert row.event is not None and report.trace[row.event + 1]["kind"] != "lookup.namesake"
    assert row.differs == ("salt",) and "differs in the cache salt" in str(row.message)
