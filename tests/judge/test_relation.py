# SPDX-License-Identifier: Apache-2.0
"""Tests of relations between two runs of one case."""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.contract.requirement import Requirement
from kvconform.judge.relation import RelateMonitor, relate_runs

Event = dict[str, Any]


def compare(first: list[Event], second: list[Event], **relate: Any) -> RelateMonitor:
    spec = {
        "runs": ["connector", "no-connector"],
        "event": "sample",
        "project": "(e.req, e.index, e.token)",
        **relate,
    }
    req = Requirement.model_validate(
        {"id": "compose.null-effect", "text": "It MUST be.", "relate": spec}
    )
    numbered = [
        [{"seq": seq, "step": seq // 2, **event} for seq, event in enumerate(side)]
        for side in (first, second)
    ]
    found = relate_runs(req, dict(zip(["connector", "no-connector"], numbered, strict=True)))
    assert found is not None
    return found


def sample(req: str, index: int, token: int) -> Event:
    return {
        "kind": "sample",
        "req": req,
        "index": index,
        "token": token,
        "generation": 0,
        "clean": True,
    }


A = [sample("a", 0, 5), sample("a", 1, 6)]
B = [sample("b", 0, 7)]


def test_equal_runs() -> None:
    found = compare([*A, {"kind": "run.end"}], [{"kind": "hold"}, *A])
    assert found.count == 0 and found.exercised == 4 and found.error is None
    assert compare([], []).exercised == 0


def test_the_first_difference_is_reported_with_both_sides() -> None:
    found = compare([*A, *B], [A[0], sample("a", 1, 9), sample("b", 0, 8)])
    assert found.count == 1
    violation = found.violations[0]
    check = "`connector` and `no-connector` differ at sample 1: ('a', 1, 6) against ('a', 1, 9)"
    assert violation.check == check
    assert violation.message == "without a connector: token 1 of a's output is 9", (
        "the other side is told in front of it"
    )
    assert (violation.seq, violation.event, violation.req) == (1, 1, "a")


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [(A[:1], A, "nothing against ('a', 1, 6)"), (A, A[:1], "('a', 1, 6) against nothing")],
)
def test_a_run_that_stops_earlier(first: list[Event], second: list[Event], text: str) -> None:
    found = compare([*first, {"kind": "run.end"}], second)
    assert text in found.violations[0].check
    # the sample that is too many, or the end of the run that lacks it
    assert found.violations[0].seq == 1
    assert compare(first, second, prefix=True).count == 0


def test_order_counts_unless_it_is_per_key() -> None:
    assert compare([*A, *B], [*B, *A]).count == 1
    assert compare([*A, *B], [*B, *A], per="e.req").count == 0
    assert compare(A, list(reversed(A)), per="e.req").count == 1


def test_every_key_has_its_own_first_difference() -> None:
    found = compare(
        [*A, *B], [sample("a", 0, 1), sample("b", 0, 2)], per="e.req", project="e.token"
    )
    assert [(v.req, v.seq) for v in found.violations] == [("a", 0), ("b", 2)]
    assert found.violations[0].check.endswith("differ at sample 0 of 'a': 5 against 1")
    assert (
        compare(A, B, per="e.req", prefix=True).count == 0 and compare(A, B, per="e.req").count == 2
    )


def test_guards_and_missing_runs() -> None:
    assert compare([*A, *B], A, where="e.req == 'a'").count == 0
    spec = {"runs": ["connector", "hash-seed"], "event": "sample", "project": "e.token"}
    req = Requirement.model_validate({"id": "x.y", "text": "It MUST be.", "relate": spec})
    assert relate_runs(req, {"connector": []}) is None


@pytest.mark.parametrize("run", ["pickled-metadata", "second-process", "hash-seed"])
def test_a_run_that_breaks_off_does_not_agree_with_one_that_does_not(run: str) -> None:
    crash = {
        "kind": "engine.crash", "seq": 2, "step": 3, "error": "RemoteError: no table", "hook": "x"
    }  # fmt: skip
    spec = {"runs": ["connector", run], "event": "sample", "project": "e.token", "prefix": True}
    req = Requirement.model_validate({"id": "x.y", "text": "It MUST be.", "relate": spec})
    step_3 = {"kind": "worker.step_end", "seq": 8, "step": 3}
    whole = [*A, step_3, {"kind": "run.end", "seq": 9, "step": 7}]
    broken = [A[0], crash]
    found = relate_runs(req, {"connector": whole, run: broken})
    assert found is not None and found.count == 1
    violation = found.violations[0]
    assert (violation.step, violation.event) == (
        3,
        8,
    ) and "RemoteError: no table (in x)" in violation.message
    assert violation.check == f"`{run}` ended with engine.crash in step 3, and `connector` did not"
    for fine in ({"connector": [*whole, crash], run: broken}, {"connector": whole, run: whole}):
        both = relate_runs(req, fine)
        assert both is not None and both.count == 0


def test_a_run_without_a_connector_that_breaks_off_is_no_fault_of_the_connector() -> None:
    crash = {"kind": "engine.crash", "seq": 2, "step": 3, "error": "OSError: full", "hook": None}
    assert compare(A, [A[0], crash], prefix=True).count == 0


def test_a_projection_that_raises_is_an_error() -> None:
    found = compare([{"kind": "sample"}], [])
    assert found.error is not None and "KeyError" in found.error


def test_the_earliest_differences_are_kept_whatever_the_keys_hash_to() -> None:
    one = [{**sample(f"r{number}", 0, 1), "seq": number} for number in range(60)]
    other = [{**each, "token": 2} for each in one]
    found = compare(one, other, per="e.req", project="e.token")
    assert [violation.seq for violation in found.violations] == list(
        range(len(found.violations))
    ) and found.count == 60


def test_one_value_in_common_is_enough_where_parts_depend_on_threads() -> None:
    per = {"per": "e.req", "project": "e.token", "common": True}
    assert compare(A, list(reversed(A)), **per).count == 0
    assert compare(A, [A[0]], **per).count == 0
    assert compare(A, B, **per).count == 0  # neither run has what the other one has
    other = [event | {"token": event["token"] + 1000} for event in A]
    found = compare(A, other, **per)
    assert [v.req for v in found.violations] == ["a"]
    assert found.violations[0].check.endswith("differ at sample 0 of 'a': 5 against 1005")


def test_a_difference_says_what_the_sentence_leaves_out() -> None:
    same = compare([A[0]], [A[0] | {"generation": 7}], project="(e.req, e.generation)")
    assert same.violations[0].message.endswith("is 5, as ('a', 7) and not ('a', 0)")
