# SPDX-License-Identifier: Apache-2.0
"""Tests that every real bug of spec/bugs.yaml is shown by something, or waived with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.contract.loader import Spec, SpecError, load_spec
from kvconform.dev import docs

SPEC = load_spec()
BUGS = docs.load()


def shown(spec: Spec) -> set[str]:
    """Return the bugs that a requirement, a case or a planted defect names."""
    named = [each.bugs for each in (*spec.requirements.values(), *spec.cases.values())]
    named += [defect.get("bugs", []) for defect in spec.defects.values()]
    return {bug for bugs in named for bug in bugs}


def test_every_bug_is_shown_or_waived_and_not_both() -> None:
    assert shown(SPEC) | SPEC.bug_waivers.keys() == BUGS.keys()
    assert not shown(SPEC) & SPEC.bug_waivers.keys()


def test_a_waiver_without_a_reason_does_not_load(tmp_path: Path) -> None:
    good = {"bug": "B001", "because": "no promise", "reason": "r", "link": "l"}
    _write(tmp_path, good)
    assert load_spec(tmp_path).bug_waivers["B001"].reason == "r"
    _write(tmp_path, {**good, "reason": ""})
    with pytest.raises(SpecError, match="reason"):
        load_spec(tmp_path)


def _write(root: Path, waiver: dict[str, str]) -> None:
    (root / "waivers.yaml").write_text(f"- {waiver}\n", encoding="utf-8")
