# SPDX-License-Identifier: Apache-2.0
"""Tests of which runs a change reaches, and of which runs are repeated first."""

from __future__ import annotations

from kvconform.watch.loop import peeked
from kvconform.watch.reach import changed_lines, move, reaching
from kvconform.watch.results import Result

OLD = ["def f():", "    return 1", "def g():", "    return 2"]


def test_a_replaced_line() -> None:
    assert changed_lines({"a": OLD}, {"a": [*OLD[:3], "    return 3"]}) == {"a": [4]}


def test_an_added_line_counts_for_its_neighbours() -> None:
    assert changed_lines({"a": OLD}, {"a": [*OLD[:2], "x", *OLD[2:]]}) == {"a": [2, 3]}


def test_a_deleted_line_and_a_deleted_file() -> None:
    assert changed_lines({"a": OLD, "b": ["x"]}, {"a": OLD[:3]}) == {"a": [4], "b": [1]}


def test_what_is_the_same_reaches_nothing() -> None:
    assert changed_lines({"a": OLD}, {"a": list(OLD), "new": ["x"]}) == {}


def test_runs_that_executed_a_changed_line() -> None:
    results = [
        Result("one", lines={"a": [1, 2]}),
        Result("two", lines={"a": [3, 4]}),
        Result("other-file", lines={"b": [4]}),
    ]
    assert reaching(results, {"a": [4]}) == ["two"]
    assert reaching(results, {}) == []


def test_one_run_for_each_requirement_is_repeated_first() -> None:
    failing = {"r1": {"a": "", "b": ""}, "r2": {"b": "", "a": ""}, "r3": {"c": ""}}
    assert peeked(failing, {}) == ["a", "c"]
    assert len(peeked({f"r{n}": {f"run{n}": ""} for n in range(9)}, {})) == 4
    assert peeked({"r1": {"a": "", "b": ""}}, {"a": 2.0, "b": 1.0}) == ["b"]


def test_lines_move_with_what_is_added_above_them() -> None:
    new = ["import x", *OLD[:3], "    return 3"]
    result = Result("run", lines={"a": [1, 2, 4], "b": [7]})
    move([result], {"a": OLD}, {"a": new})
    assert result.lines == {"a": [2, 3], "b": [7]}
