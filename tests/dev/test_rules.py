# SPDX-License-Identifier: Apache-2.0
"""Tests of the rules of the contract: every one is either covered or waived."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvconform.contract.loader import Spec, load_spec
from kvconform.dev import lint

RULES = [
    {"rule": "R001", "who": "connector MUST", "title": "an obligation"},
    {"rule": "R002", "who": "hazard", "title": "a hazard"},
]
REQUIREMENT = {
    "id": "a.b",
    "level": "MUST",
    "text": "x MUST.",
    "event": "run.end",
    "always": "e.quiesced",
    "rules": ["R001"],
}
CASE = {"id": "a.c", "area": "a", "text": "x", "rules": ["R001", "R002"], "steps": [{"run": {}}]}
WAIVER = {"rule": "R001", "because": "wrong", "reason": "x", "link": "v1/core.py"}


def spec(
    tmp_path: Path,
    requirement: dict[str, Any] | None = None,
    case: dict[str, Any] | None = None,
    *waivers: Any,
) -> Spec:
    root = tmp_path / "spec"
    (root / "requirements").mkdir(parents=True, exist_ok=True)
    (root / "cases" / "a").mkdir(parents=True, exist_ok=True)
    (root / "requirements" / "a.yaml").write_text(
        json.dumps([{**REQUIREMENT, **(requirement or {})}])
    )
    (root / "cases" / "a" / "a.c.yaml").write_text(json.dumps({**CASE, **(case or {})}))
    (root / "rules.yaml").write_text(json.dumps(RULES))
    (root / "waivers.yaml").write_text(json.dumps(list(waivers)))
    return load_spec(root, cache=False)


def found(spec: Spec) -> list[str]:
    return [number for number, _ in lint.problems(spec)]


def test_covered_rules_are_no_problem(tmp_path: Path) -> None:
    assert found(spec(tmp_path)) == []


def test_a_case_covers_hazards_only(tmp_path: Path) -> None:
    assert found(spec(tmp_path, {"rules": []})) == ["R001"]
    assert found(spec(tmp_path, None, {"rules": ["R001"]})) == ["R002"]
    assert found(spec(tmp_path, {"rules": ["R001", "R002"]}, {"rules": []})) == []


def test_a_waiver_stands_for_a_cover_and_not_beside_one(tmp_path: Path) -> None:
    assert found(spec(tmp_path, {"rules": []}, None, WAIVER)) == []
    assert found(spec(tmp_path, None, None, WAIVER)) == ["R001"]
    assert found(spec(tmp_path, None, None, {**WAIVER, "rule": "R009"})) == ["R009"]


def test_an_unknown_rule_is_found(tmp_path: Path) -> None:
    assert found(spec(tmp_path, {"rules": ["R001", "R003"]})) == ["R003"]


def test_a_finding_says_where(tmp_path: Path) -> None:
    (finding,) = lint.check_rules(spec(tmp_path, None, None, WAIVER))
    assert (finding.code, str(finding.where)) == ("L029", "spec/waivers.yaml:1")
    (finding,) = lint.check_rules(spec(tmp_path, {"rules": []}))
    assert str(finding.where) == "spec/rules.yaml:1" and "R001 (an obligation)" in finding.message


def test_every_rule_has_a_title_of_its_own() -> None:
    known = load_spec().rules
    assert list(known) == [f"R{number:03}" for number in range(1, 231)]
    assert len({rule.title for rule in known.values()}) == 230
