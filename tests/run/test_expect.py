# SPDX-License-Identifier: Apache-2.0
"""Tests of the expectations of cases, evaluated on a real run.

Each holds where it should, and reports what is wrong where it should not hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core_rig import REFERENCE, make_case, run_case, select
from kvconform.config.target import Target
from kvconform.run.records import Run
from kvconform.run.runner import run_variant

Expectation = dict[str, Any]
STEPS: list[dict[str, Any]] = [
    {"add": {"req": "a", "prompt": 10, "max_tokens": 6, "drafts": [1, 0]}},
    {"add": {"req": "b", "prompt": 22, "max_tokens": 3}},
    {"step": 4},
    {"preempt": "a"},
    {"abort": "b"},
    {"run": {}},
    {"drop-local": {}},
    {"add": {"req": "c", "prompt": {"of": "a", "outputs": True, "then": 3}, "max_tokens": 2}},
    {"run": {}},
    {"add": {"req": "d", "prompt": {"same": "c"}, "max_tokens": 2}},
    {"run": {}},
]
CONFIG = {"budget": 12, "spec_tokens": 2}
ROWS = {"req": "c", "fields": ["computed", "scheduled", "known"]}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run itself, to count by hand."""
    return run_case(REFERENCE, STEPS, tmp_path_factory.mktemp("given"), config=CONFIG)


def evaluate(
    expectation: Expectation, tmp_path: Path, *, at_end: bool = True, **more: Any
) -> tuple[bool, str]:
    """(holds, detail) of one expectation."""
    steps = STEPS if at_end else [*STEPS[:4], {"expect": expectation}, *STEPS[4:]]
    run = run_case(
        REFERENCE,
        steps,
        tmp_path,
        config=CONFIG,
        **({"expect": [expectation]} if at_end else {}),
        **more,
    )
    assert run.harness_error is None, run.harness_error
    (event,) = select(run.trace, "case.expectation")
    assert event["what"] == next(iter(expectation))
    return event["holds"], event["detail"]


def test_the_run_is_what_the_numbers_below_count(given: Run) -> None:
    assert select(given.trace, "req.state", req="a", reason="preempt") and select(
        given.trace, "req.finished", status="FINISHED_ABORTED"
    )
    assert next(
        (e["computed"], e["scheduled"], e["known"])
        for e in select(given.trace, "req.scheduled", req="c")
    ) == (12, 7, 19)


HOLDS: list[Expectation] = [
    {"preempted": "a"},
    {"preempted": {"req": "b", "equal": 0}},
    {"preempted": {"equal": 1}},
    {"resumed": "a"},
    {"aborted": "b"},
    {"aborted": {"req": "a", "equal": 0}},
    {"chunks": {"req": "b", "at_least": 2}},
    {"chunks": {"req": "c", "equal": 1}},
    {"loads": {"req": "c", "equal": 1}},
    {"external": {"req": "c", "equal": 12}},
    {"rejected": {"req": "a", "at_least": 1}},
    {"failed-loads": {"equal": 0}},
    {"repeated-lookups": {"req": "c", "equal": 0}},
    {"local-hits": {"req": "d", "equal": 16}},
    {"copies": {"equal": 0}},
    {"outputs": {"req": "a", "count": 6, "finish": "length", "clean": True}},
    {"outputs": {"req": "b", "finish": "abort"}},
    {"outputs": {"req": "d", "same_as": "c"}},
    {"outputs": {"req": "a", "count": {"sync": 6, "async": 99}}},
    {"rows": {**ROWS, "values": [[12, 7, 19], [19, 3, 20]]}},
    {"free_blocks": 31},
]
FAILS: list[tuple[Expectation, str]] = [
    ({"preempted": {"req": "a", "equal": 2}}, "preemptions of a: 1, expected 2"),
    ({"preempted": "b"}, "preemptions of b: 0, expected at least 1"),
    ({"resumed": {"at_least": 9}}, "resumptions: 1, expected at least 9"),
    ({"aborted": "a"}, "aborts of a: 0"),
    ({"chunks": {"req": "c", "at_least": 2}}, "prefill chunks of c: 1"),
    ({"loads": {"req": "c", "equal": 0}}, "loads of c: 1, expected 0"),
    ({"external": {"req": "c", "equal": 11}}, "external tokens of c: 12"),
    ({"rejected": {"req": "d", "equal": 0}}, "rejected drafts of d"),
    ({"failed-loads": 1}, "failed loads: 0"),
    ({"repeated-lookups": "c"}, "repeated lookups of c: 0"),
    ({"local-hits": {"req": "c", "equal": 1}}, "local hits of c: 0"),
    ({"copies": "c"}, "copied blocks of c: 0"),
    ({"outputs": {"req": "a", "count": 5}}, "a produced 6 tokens, expected 5"),
    ({"outputs": {"req": "b", "finish": "length"}}, "b ended as FINISHED_ABORTED"),
    ({"outputs": {"req": "a", "same_as": "c"}}, "a produced ["),
    ({"outputs": {"req": "a", "clean": False}}, "sampled from wrong KV"),
    ({"rows": {**ROWS, "values": [[12, 7, 19], [19, 3, 21]]}}, "row 2 of c"),
    ({"rows": {**ROWS, "values": [[12, 7, 19]]}}, "c was scheduled 2 times, expected 1"),
    ({"free_blocks": 30}, "31 free blocks, expected 30"),
]


@pytest.mark.parametrize("expectation", HOLDS, ids=str)
def test_what_holds(expectation: Expectation, tmp_path: Path) -> None:
    assert evaluate(expectation, tmp_path) == (True, "")


@pytest.mark.parametrize(("expectation", "text"), FAILS, ids=str)
def test_what_does_not_hold(expectation: Expectation, text: str, tmp_path: Path) -> None:
    holds, detail = evaluate(expectation, tmp_path)
    assert not holds and text in detail


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (
            {
                "req": "a",
                "status": "preempted",
                "computed": 0,
                "placeholders": 0,
                "real": 0,
                "in_flight": 0,
            },
            None,
        ),
        ({"req": "a", "status": "running"}, "status of a is preempted, expected running"),
        ({"req": "a", "tokens": 3}, "tokens of a is"),
        ({"req": "b", "computed": 9999}, "computed of b is"),
    ],
)
def test_the_state_at_a_point(state: Expectation, problem: str | None, tmp_path: Path) -> None:
    holds, detail = evaluate({"state": state}, tmp_path, at_end=False)
    assert holds == (problem is None) and (problem or "") in detail


def test_a_request_that_is_gone_has_no_state(tmp_path: Path) -> None:
    assert evaluate({"state": {"req": "a", "status": "running"}}, tmp_path) == (
        False,
        "request a does not exist any more",
    )


def test_a_guard_that_does_not_hold_skips_the_expectation(tmp_path: Path) -> None:
    expect = [
        {"loads": {"equal": 7, "when": "cap.lossy"}},
        {"loads": {"at_least": 1, "when": "cfg.scheduling == 'sync'"}},
    ]
    run = run_case(REFERENCE, STEPS, tmp_path, config=CONFIG, expect=expect)
    assert [e["holds"] for e in select(run.trace, "case.expectation")] == [True]


def test_a_stimulus_that_did_not_happen_is_no_event(tmp_path: Path) -> None:
    run = run_case(
        REFERENCE,
        STEPS,
        tmp_path,
        config=CONFIG,
        provokes=[{"preempted": "a"}, {"preempted": "b"}, {"loads": 9}],
    )
    assert run.unmet == [
        "preempted: preemptions of b: 0, expected at least 1",
        "loads: 1, expected at least 9",
    ]
    assert not select(run.trace, "case.expectation")


def test_an_error_is_expected_only_of_a_request_that_loads(tmp_path: Path) -> None:
    """A connector may load nothing, and then no load can fail (policy `fail`)."""
    loads_nothing: Expectation = {"outputs": {"req": "a", "finish": "error"}}
    run = run_case(REFERENCE, STEPS, tmp_path / "none", config=CONFIG, expect=[loads_nothing])
    assert run.harness_error is None, run.harness_error
    assert select(run.trace, "case.expectation") == []
    loads: Expectation = {"outputs": {"req": "c", "finish": "error"}}
    holds, detail = evaluate(loads, tmp_path / "some")
    assert not holds
    assert detail == "c ended as FINISHED_LENGTH_CAPPED, expected FINISHED_ERROR"


def test_outputs_are_not_expected_where_kv_is_made_up(tmp_path: Path) -> None:
    wrong: Expectation = {"outputs": {"req": "a", "count": 99}}
    holds, _ = evaluate(wrong, tmp_path / "computed")
    assert not holds
    case = make_case(STEPS, config=CONFIG, expect=[wrong])
    zeros = Target("kvconform.refimpl.variants.zeros:Zeros", capabilities={"synthesises_kv": True})
    (variant, *_) = case.variants(["reference"], ["sync"])
    run = run_variant(variant, zeros, seed=0, tmp=tmp_path / "made-up")
    assert run.harness_error is None, run.harness_error
    assert select(run.trace, "case.expectation") == []
