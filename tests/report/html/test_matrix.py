# SPDX-License-Identifier: Apache-2.0
"""Tests of the matrix of report.html: all numbers add up."""

from __future__ import annotations

from kvconform.contract.loader import load_spec
from kvconform.judge.aggregate import aggregate
from kvconform.judge.records import Row, Verdict
from kvconform.report.html.matrix import areas, counted

SPEC = load_spec()
FAILS, HOLDS, SILENT = "save.owned", "save.confirmed", "load.position"


def rows() -> list[Row]:
    """Of 5 runs, 2 fail, 1 holds, and 2 say nothing; another engine has one run."""
    verdicts = {
        FAILS: (["FAIL", "FAIL", "PASS", "NOT_EXERCISED", "UNSUPPORTED"], "PASS"),
        HOLDS: (["PASS"] * 5, "NOT_EXERCISED"),
        SILENT: (["NOT_EXERCISED"] * 5, "UNSUPPORTED"),
    }
    found = []
    for name, (reference, vllm) in verdicts.items():
        runs = [("reference", f"case{number}", one) for number, one in enumerate(reference)]
        for engine, case, verdict in [*runs, ("vllm", "case0", vllm)]:
            found.append(Row(name, case, engine, "sync", "v1", 1, 4, Verdict(verdict)))
    return found


def test_the_numbers_of_a_cell_add_up_to_the_runs_of_its_column() -> None:
    found = areas(rows(), SPEC)
    (save,) = [area for area in found if area.name == SPEC.requirements[FAILS].area]
    assert [(column.title, column.runs) for column in save.columns] == [
        ("reference sync", 5),
        ("vllm sync", 1),
    ]
    (line,) = [line for line in save.lines if line.requirement == FAILS]
    assert line.cells[0] == [
        (Verdict.FAIL, 2),
        (Verdict.PASS, 1),
        (Verdict.NOT_EXERCISED, 1),
        (Verdict.UNSUPPORTED, 1),
    ]
    for area in found:
        for line in area.lines:
            for column, cell in zip(area.columns, line.cells, strict=True):
                assert sum(number for _, number in cell) == column.runs


def test_a_requirement_has_the_status_that_the_other_reports_give_it() -> None:
    found = areas(rows(), SPEC)
    lines = {line.requirement: line.verdict for area in found for line in area.lines}
    assert lines == aggregate(rows()).status
    for area in found:
        assert sum(number for _, number in area.counts) == len(area.lines)
        assert area.failing == (FAILS in [line.requirement for line in area.lines])


def test_an_engine_on_which_a_requirement_was_not_judged_has_an_empty_cell() -> None:
    found = areas([row for row in rows() if row.run != rows()[-1].run], SPEC)
    assert counted([]) == []
    assert all(len(area.columns) == 1 for area in found)
    crashed = [*rows(), Row("other.rule", "case0", "vllm", "sync", "v1", 1, 4, Verdict.FAIL)]
    (other,) = [area for area in areas(crashed, SPEC) if area.name == "other"]
    assert other.lines[0].cells == [[], [(Verdict.FAIL, 1)]]
