# SPDX-License-Identifier: Apache-2.0
"""Root causes are told apart by what a failure says, not by its numbers."""

from __future__ import annotations

import pytest

from kvconform.judge.verdict import Row, Verdict
from kvconform.report.causes import SHOWN, by_cause, signature, split


def row(requirement: str, message: str, case: str = "c") -> Row:
    return Row(requirement, case, "vllm", "sync", "v1", 1, 4, Verdict.FAIL, message=message)


def test_numbers_names_and_the_check_do_not_make_a_cause() -> None:
    first = "asked for b (17 tokens, 12 of them local), the connector answered -4 tokens [`e.tokens < 0` is true]"
    second = "asked for a (9 tokens, 8 of them local), the connector answered -2 tokens [`e.tokens < 1` is true]"
    assert signature(first) == signature(second)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "of the 16 tokens granted to d from position 0, position 12 was never written and no failure was reported",
            "of the 16 tokens granted to d from position 0, positions 12-13 were never written and no failure was reported",
        ),
        (
            "V of position 3 of request alpha (layer 0, block 2, loaded by the connector) hold unknown: bytes",
            "K and V of positions 3-9 of request beta (layer 1 of KV cache group 1, block 7, loaded by the connector) hold unknown: it",
        ),
        (
            "at the end of the run requests alpha are still there",
            "at the end of the run requests beta, gamma are still there",
        ),
        (
            "at the end of the run Request objects of alpha are still referenced",
            "at the end of the run Request objects of beta, gamma are still referenced",
        ),
        ("no progress; waiting: alpha", "no progress; waiting: nobody"),
        (
            "2 times req.finished for e.req='alpha', at most 1 allowed",
            "3 times req.finished for e.req='beta', at most 1 allowed",
        ),
        (
            "update raised KeyError: 'alpha' (conn.py:12, in _drop)",
            "update raised KeyError: 'beta' (conn.py:31, in _drop)",
        ),
        (
            "get_finished raised ValueError: no blocks of request alpha",
            "get_finished raised ValueError: no blocks of request beta-two",
        ),
        (
            "alpha got 0 tokens (0 of them local), 24 were announced by KV events",
            "alpha got 0 tokens (0 of them local), 24 were announced by KV events; announced and not there: blocks 15-20",
        ),
    ],
)
def test_how_many_and_whose_do_not_make_a_cause(one: str, other: str) -> None:
    assert signature(one) == signature(other) != ""


def test_the_name_of_the_request_that_a_failure_is_about_does_not_make_a_cause() -> None:
    rows = [
        row("alloc.rule", f"{name} was granted 4 external tokens after 0 local ones, in blocks []")
        for name in ("alpha", "beta")
    ]
    assert len(by_cause(rows)) == 2, "nothing says that these words are names"
    rows[0].req, rows[1].req = "alpha", "beta"
    assert len(by_cause(rows)) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            ": block table too short (conn.py:12, in _grow)",
            ": key missing in the store (conn.py:40, in _drop)",
        ),
        (" (conn.py:12, in _grow)", " (conn.py:12, in _drop)"),
        (" (lmcache_v1.py:12, in put)", " (store_v2.py:12, in put)"),
        ("; the store is full", "; the store is closed"),
    ],
)
def test_exceptions_that_begin_alike_are_told_apart(one: str, other: str) -> None:
    same = "update_state_after_alloc raised RuntimeError: connector state is inconsistent for this request"
    assert signature(same + one) != signature(same + other)


def test_another_exception_is_another_cause() -> None:
    rows = [
        row(
            "hook.no-raise",
            "start_load_kv raised RuntimeError: shape mismatch: value tensor of shape [2, 3]",
            "one",
        ),
        row(
            "hook.no-raise",
            "start_load_kv raised FileNotFoundError: No such file or directory: {tmp}/x1/y.safetensors",
            "two",
        ),
        row(
            "hook.no-raise",
            "start_load_kv raised RuntimeError: shape mismatch: value tensor of shape [4, 5]",
            "three",
        ),
    ]
    assert [[r.case for r in group] for group in by_cause(rows)] == [["one", "three"], ["two"]]


def test_groups_of_a_requirement_stay_together_and_are_few() -> None:
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    rows = [row("r.one", f"raised {word}") for word in words] + [
        row("r.two", "raised alpha"),
        row("r.one", "raised alpha"),
    ]
    groups = by_cause(rows)
    assert [g[0].requirement for g in groups] == ["r.one"] * SHOWN + ["r.two"]
    assert sum(len(g) for g in groups) == len(rows)


def test_what_was_seen_and_the_check_are_told_apart() -> None:
    assert split("b got 16 tokens, in blocks [1, 2] [`e.a == [1]` is false: e.a=2]") == (
        "b got 16 tokens, in blocks [1, 2]",
        "e.a == [1] is false: e.a=2",
    )
    told, check = split(
        "b got 16 tokens [events.lookup #365 (t.untold=[0]) was not followed by kv.event before run.end]"
    )
    assert told == "b got 16 tokens" and check.startswith("events.lookup #365")
    assert split("raised KeyError: no key [kv_store after 3 retries] [`e.error is None` is false]")[
        0
    ].endswith("3 retries]")
    assert split("raised KeyError: [a] is missing") == ("raised KeyError: [a] is missing", "")
    assert split(None) == ("", "")


def test_what_happened_first_in_a_run_comes_first() -> None:
    rows = [
        row("hook.no-raise", "raised"),
        row("meta.returned", "returned None"),
        row("events.complete", "0"),
        row("reset.forgets", "16"),
    ]
    for one, event in zip(rows, (40, 12, 3, 3), strict=True):
        one.event = event
    assert [group[0].requirement for group in by_cause(rows)] == [
        "reset.forgets",
        "meta.returned",
        "hook.no-raise",
        "events.complete",
    ]
    mixed = [row("c.c", "x", "one"), row("b.b", "y", "two"), row("a.a", "z", "one")]
    for one, event in zip(mixed, (50, 7, 10), strict=True):
        one.event = event
    assert [group[0].requirement for group in by_cause(mixed)] == ["a.a", "c.c", "b.b"], (
        "whatever lies between"
    )
    rows[1].case = "elsewhere"  # another run's time is another
    assert [group[0].requirement for group in by_cause(rows[:2])] == [
        "hook.no-raise",
        "meta.returned",
    ]
