# SPDX-License-Identifier: Apache-2.0
"""Tests of the page that says what covers which system."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvconform.contract.loader import load_spec
from kvconform.dev import systems
from kvconform.dev.defect import load_defects
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


BELONGS = {
    "row": "B14",
    "about": "x",
    "judged": ["pins.released"],
    "provoked": ["lifecycle.lookup-then-abort"],
    "built": ["refimpl/cache/holds.py"],
    "bites": ["leaks-pins"],
}


def test_parts_of_a_row_that_belong_together_are_no_problem() -> None:
    assert Row.model_validate(BELONGS).strangers(load_defects(SPEC)) == []


@pytest.mark.parametrize(
    "changed", [{"judged": ["save.owned"]}, {"provoked": ["lifecycle.last-token"]}]
)
def test_a_defect_that_fails_nothing_of_its_row_is_refused(changed: dict[str, list[str]]) -> None:
    row = Row.model_validate({**BELONGS, **changed})
    assert row.problems(SPEC, ROOT) == []
    foreign, unbitten = row.strangers(load_defects(SPEC))
    assert foreign.startswith("B14: defect leaks-pins fails no requirement of the row on a case")
    assert unbitten.startswith(f"B14: no defect of the row fails {row.judged[0]} ")
    waived = row.model_copy(update={"waived": "x"})
    assert waived.strangers(load_defects(SPEC)) == []


def test_a_requirement_that_no_defect_of_its_row_fails_is_refused() -> None:
    row = Row.model_validate({**BELONGS, "judged": ["pins.released", "lookup.lease"]})
    assert row.strangers(load_defects(SPEC)) == [
        "B14: no defect of the row fails lookup.lease on a case of the row"
    ]


def test_the_page_is_not_made_of_rows_whose_parts_do_not_belong_together(tmp_path: Path) -> None:
    (tmp_path / "spec").mkdir()
    (tmp_path / "refimpl").symlink_to(ROOT / "refimpl")
    row = json.dumps([{**BELONGS, "judged": ["save.owned"]}])
    (tmp_path / "spec" / "systems.yaml").write_text(row, encoding="utf-8")
    with pytest.raises(UsageError, match="B14: defect leaks-pins fails no requirement"):
        systems.load(SPEC, tmp_path)


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
