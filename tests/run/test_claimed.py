# SPDX-License-Identifier: Apache-2.0
"""Tests that a wrong claim names the request whose KV it is, and shows when that was stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.contract.steps import Add
from kvconform.judge.records import Row
from kvconform.report.timeline import render
from kvconform.run.case import run_and_judge
from kvconform.run.namesakes import ELSEWHERE, REORDERED, RESTARTED, differences

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
    differs = "another path of its adapter ('/adapters/monday', '/adapters/tuesday')"
    assert f"request a begins with the same 14 tokens and has {differs}" in str(row.message)
    kinds = [line.split()[1:3] for line in lines]
    assert ["plan", "save"] in kinds and ["namesake", "a"] in kinds


def test_an_image_at_another_place_is_no_other_image(tmp_path: Path) -> None:
    """Request z has another image over the same tokens, and came first."""
    row, _ = found("identity.image-offset", "identity:ImagesAnywhere", "lookup.identity", tmp_path)
    assert "request a begins with the same 18 tokens and has another place of its" in str(
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


CAT = {"at": 1, "length": 2, "id": "cat"}
DOG = {"at": 4, "length": 2, "id": "dog"}


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"salt": "s"}, {}, ["cache salt ('s', none)"]),
        ({"lora": "x"}, {}, ["adapter ('x', none)"]),
        ({"lora": "x"}, {"lora": "y"}, ["name of its adapter ('x', 'y')"]),
        (
            {"embeds": "p", "salt": "s"},
            {"embeds": "q"},
            ["cache salt ('s', none)", "prompt embedding"],
        ),
        ({"mm": [CAT]}, {}, ["multi-modal item"]),
        ({"mm": [CAT]}, {"mm": [CAT | {"at": 2}]}, [ELSEWHERE]),
        ({"mm": [CAT, DOG]}, {"mm": [DOG | {"at": 1}, CAT | {"at": 4}]}, [REORDERED]),
        ({}, {}, [RESTARTED]),
    ],
)
def test_differences(one: dict[str, Any], other: dict[str, Any], words: list[str]) -> None:
    first, second = (Add.model_validate({"req": "a", "prompt": 9, **each}) for each in (one, other))
    assert list(differences(first, second)) == words


def test_a_request_that_is_alike_is_no_namesake(tmp_path: Path) -> None:
    """Request b has loaded the KV that c asks for; it is a's, whose cache salt is b's adapter."""
    variant = SPEC.cases["identity.adapter-called-salt"].variants(["reference"], None)[0]
    target = Target("kvconform.refimpl.defects.identity:JoinsNames", {"store": "memory:{tmp}"})
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path)
    named = [(e["req"], e["of"]) for e in select(report.trace, "lookup.namesake")]
    assert ("c", "a") in named and all(of == "a" for _, of in named)
