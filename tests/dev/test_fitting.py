# SPDX-License-Identifier: Apache-2.0
"""Tests of what the rows of docs/results rest on: which finding fits which failure, and risks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from kvconform.contract.loader import load_spec
from kvconform.dev.results import basis, digest, finding, page
from kvconform.dev.results.digest import Digest
from kvconform.dev.results.finding import Finding, Severity
from results_rig import HERE, report

SPEC = load_spec()
LINE = "start_load_kv: tensor = read(file)"
RAISED = {"place": ["c.py", 7, "start_load_kv", "tensor = read(file)"]}
RISK = {"gating": False, "beyond": ["damage"]}


def row(requirement: str, case: str, **fields: Any) -> dict[str, Any]:
    return {
        "requirement": requirement,
        "case": case,
        "engine": "vllm",
        "verdict": "FAIL",
        "count": 1,
        "exercised": 1,
        **fields,
    }


ROWS = [
    row("hook.no-raise", "chunked.abort", **RAISED),
    row("hook.no-raise", "lifecycle.busy-step"),
    row("hook.no-raise", "lifecycle.damage-removed", **RAISED, **RISK),
    row("save.owned", "lifecycle.damage-removed", **RISK),
    row("load.position", "chunked.abort", verdict="PASS"),
]


def made(tmp_path: Path) -> Digest:
    (found,) = digest.digests(report(tmp_path / "r", ROWS), "example", [], "2026-01-01", SPEC)
    digest.write(tmp_path, found)
    (again,) = digest.read(tmp_path)
    return again


def about(requirement: str, **fields: Any) -> Finding:
    (known,) = (each for each in finding.read(HERE) if each.id == "example-identity")
    plain: dict[str, Any] = {"case": "own.yaml", "cases": [], "lines": [], "rows": []}
    return known.model_copy(update={"requirements": [requirement], **plain, **fields})


def test_a_digest_keeps_risks_and_where_requirements_failed(tmp_path: Path) -> None:
    found = made(tmp_path)
    assert basis.failed(found) == ["hook.no-raise"]
    assert basis.at_risk(found) == ["save.owned"] and found.knows_risks
    assert found.failures == {
        "hook.no-raise": {"chunked.abort": [LINE], "lifecycle.busy-step": []},
        "save.owned": {"lifecycle.damage-removed": []},
    }


@pytest.mark.parametrize(
    ("fields", "case", "line", "fits"),
    [
        ({"case": "a.b"}, "a.b", None, True),
        ({"case": "a.b"}, "a.c", None, False),
        ({"cases": ["a.*"]}, "a.c", None, True),
        ({"lines": ["read(file)"]}, "a.c", LINE, True),
        ({"lines": ["write(file)"], "cases": ["a.c"]}, "a.c", LINE, False),
        ({"lines": ["write(file)"], "cases": ["a.c"]}, "a.c", None, True),
        ({"cases": ["a.c"]}, "a.c", LINE, True),
    ],
)
def test_the_line_that_raised_decides_before_the_case(
    fields: dict[str, Any], case: str, line: str | None, fits: bool
) -> None:
    assert about("hook.no-raise", **fields).fits(case, line) is fits


@pytest.mark.parametrize(
    ("fields", "rest"),
    [
        ({}, ["hook.no-raise"]),
        ({"lines": ["read(file)"]}, ["hook.no-raise (1 of 2 cases)"]),
        ({"lines": ["read(file)"], "cases": ["lifecycle.*"]}, []),
        ({"cases": ["*"], "connector": "nixl"}, ["hook.no-raise"]),
        ({"cases": ["*"], "status": "risk"}, ["hook.no-raise"]),
    ],
)
def test_a_finding_explains_what_it_names_and_fits(
    fields: dict[str, Any], rest: list[str], tmp_path: Path
) -> None:
    found = made(tmp_path)
    assert basis.unexplained(found, [about("hook.no-raise", **fields)]) == rest
    assert basis.explained_by(found) == "case"


def test_a_row_without_cases_says_that_only_requirements_are_known(tmp_path: Path) -> None:
    old = made(tmp_path).model_copy(update={"failures": None})
    named = about("hook.no-raise")
    assert basis.unexplained(old, [named]) == []
    assert basis.explained_by(old) == "requirement only"
    text = page.pages([old], [named], SPEC, tmp_path)["example.md"]
    assert "| by requirement only: [example-identity]" in text


def test_the_pages_show_cases_without_a_finding(tmp_path: Path) -> None:
    named = about("hook.no-raise", lines=["read(file)"])
    text = page.pages([made(tmp_path)], [named], SPEC, tmp_path)["example.md"]
    (line,) = (each for each in text.splitlines() if each.startswith("| example | vllm | `hook"))
    assert line.endswith("(wrong-tokens, only-if) | `lifecycle.busy-step` |")


@pytest.mark.parametrize(
    ("findings", "shown"),
    [
        ([], "no finding; see the notes below"),
        (
            [about("save.owned", cases=["*damage*"], status="risk", reason="vLLM does not")],
            "[example-identity](example.md#example-identity) (wrong-tokens, only-if)"
            "; see the notes below",
        ),
    ],
)
def test_risks_are_in_the_row_and_have_a_finding_or_a_note(
    findings: list[Finding], shown: str, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "example.md").write_text("About `save.owned`.", encoding="utf-8")
    pages = page.pages([made(tmp_path)], findings, SPEC, tmp_path)
    assert f"| example | vllm | `save.owned` | {shown} |" in pages["example.md"]
    assert "| hook.no-raise | save.owned | hook.no-raise | case |" in pages["README.md"]


def test_a_digest_from_before_risks_does_not_say_that_there_are_none(tmp_path: Path) -> None:
    data = made(tmp_path).model_dump()
    for area in data["areas"].values():
        area["risks"] = None
    pages = page.pages([Digest.model_validate(data)], [], SPEC, tmp_path)
    assert "| hook.no-raise | not recorded |" in pages["README.md"]


def test_the_page_explains_every_effect() -> None:
    text = (HERE / "README.md").read_text(encoding="utf-8")
    effects = get_args(Severity.model_fields["effect"].annotation)
    assert [each for each in effects if f"\n- {each}: " not in text] == []
