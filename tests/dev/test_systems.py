# SPDX-License-Identifier: Apache-2.0
"""Tests of the page that says what covers which system."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconform.contract.loader import load_spec
from kvconform.dev import systems
from kvconform.dev.systems import Row
from kvconform.errors import UsageError
from places import ROOT

SPEC = load_spec()
COUNTS = {"A": 14, "B": 17, "C": 10, "D": 3}


def test_every_system_has_a_row() -> None:
    rows = [row.row for row in systems.load(SPEC, ROOT)]
    assert rows == [f"{letter}{n}" for letter, count in COUNTS.items() for n in range(1, count + 1)]


def test_a_row_without_a_gap_has_all_four() -> None:
    full = {
        "row": "A1",
        "about": "x",
        "judged": ["save.owned"],
        "provoked": ["cache.pressure"],
        "built": ["refimpl/plan.py"],
        "bites": ["keeps-pins"],
    }
    assert Row.model_validate(full).problems(SPEC, ROOT) == []
    for column in ("judged", "provoked", "built", "bites"):
        bare = Row.model_validate({**full, column: []})
        assert bare.problems(SPEC, ROOT) == [
            f"A1 has nothing in `{column}`, and does not say what is missing"
        ]
        assert bare.model_copy(update={"missing": "This."}).problems(SPEC, ROOT) == []
        wrong = Row.model_validate({**full, column: ["no.such"]})
        assert wrong.problems(SPEC, ROOT) == [
            f"A1 names no.such in `{column}`, which does not exist"
        ]


def test_a_row_that_is_listed_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spec").mkdir()
    row = "- {row: C6, about: x, missing: all of it}\n"
    (tmp_path / "spec" / "systems.yaml").write_text(row * 2, encoding="utf-8")
    with pytest.raises(UsageError, match="C6 is listed twice"):
        systems.load(SPEC, tmp_path)


def test_a_waived_row_is_not_done_and_lacks_nothing() -> None:
    row = Row.model_validate({"row": "A11", "about": "x", "waived": "vLLM has none."})
    assert not row.is_done
    assert row.problems(SPEC, ROOT) == []
