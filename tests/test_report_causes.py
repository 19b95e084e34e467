# SPDX-License-Identifier: Apache-2.0
"""Root causes are told apart by what a failure says, not by its numbers."""

from __future__ import annotations

from kvconform.report.causes import SHOWN, by_cause, signature
from kvconform.verdict import Row, Verdict


def row(requirement: str, message: str, case: str = "c") -> Row:
    return Row(requirement, case, "vllm", "sync", "v1", 1, 4, Verdict.FAIL, message=message)


def test_numbers_names_and_the_check_do_not_make_a_cause() -> None:
    first = "asked for b (17 tokens, 12 of them local), the connector answered -4 tokens [`e.tokens < 0` is true]"
    second = "asked for a (9 tokens, 8 of them local), the connector answered -2 tokens [`e.tokens < 1` is true]"
    assert signature(first) == signature(second)


def test_another_exception_is_another_cause() -> None:
    rows = [
        row("hook.no-raise", "start_load_kv raised RuntimeError: shape mismatch: value tensor of shape [2, 3]", "one"),
        row("hook.no-raise", "start_load_kv raised FileNotFoundError: No such file or directory: {tmp}/x1/y.safetensors", "two"),
        row("hook.no-raise", "start_load_kv raised RuntimeError: shape mismatch: value tensor of shape [4, 5]", "three"),
    ]
    assert [[r.case for r in group] for group in by_cause(rows)] == [["one", "three"], ["two"]]


def test_groups_of_a_requirement_stay_together_and_are_few() -> None:
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    rows = [row("r.one", f"raised {word}") for word in words] + [row("r.two", "raised alpha"), row("r.one", "raised alpha")]
    groups = by_cause(rows)
    assert [g[0].requirement for g in groups] == ["r.one"] * SHOWN + ["r.two"]
    assert sum(len(g) for g in groups) == len(rows)
