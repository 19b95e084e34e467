# SPDX-License-Identifier: Apache-2.0
"""Root causes are told apart by what a failure says, not by its numbers."""

from __future__ import annotations

from kvconform.report.causes import SHOWN, by_cause, signature, split
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


def test_what_was_seen_and_the_check_are_told_apart() -> None:
    assert split("b got 16 tokens, in blocks [1, 2] [`e.a == [1]` is false: e.a=2]") == (
        "b got 16 tokens, in blocks [1, 2]", "e.a == [1] is false: e.a=2",
    )  # fmt: skip
    told, check = split("b got 16 tokens [events.lookup #365 (t.untold=[0]) was not followed by kv.event before run.end]")
    assert told == "b got 16 tokens" and check.startswith("events.lookup #365")
    assert split("raised KeyError: no key [kv_store after 3 retries] [`e.error is None` is false]")[0].endswith("3 retries]")
    assert split("raised KeyError: [a] is missing") == ("raised KeyError: [a] is missing", "")
    assert split(None) == ("", "")


def test_what_happened_first_in_a_run_comes_first() -> None:
    rows = [row("hook.no-raise", "raised"), row("meta.returned", "returned None"), row("events.complete", "0"), row("reset.forgets", "16")]
    for one, event in zip(rows, (40, 12, 3, 3), strict=True):
        one.event = event
    assert [group[0].requirement for group in by_cause(rows)] == ["reset.forgets", "meta.returned", "hook.no-raise", "events.complete"]
    mixed = [row("c.c", "x", "one"), row("b.b", "y", "two"), row("a.a", "z", "one")]
    for one, event in zip(mixed, (50, 7, 10), strict=True):
        one.event = event
    assert [group[0].requirement for group in by_cause(mixed)] == ["a.a", "c.c", "b.b"], "whatever lies between"
    rows[1].case = "elsewhere"  # another run's time is another
    assert [group[0].requirement for group in by_cause(rows[:2])] == ["hook.no-raise", "meta.returned"]
