# SPDX-License-Identifier: Apache-2.0
"""Tests of an engine that has lost track of a request whose load failed.

The tests check from which event on the connector is not blamed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract.case import Case
from kvconform.contract.events import NO_OWNER
from kvconform.contract.loader import load_spec
from kvconform.contract.trace import Trace
from kvconform.judge.engine_bugs import lost, note_unfilled
from kvconform.refimpl.variants.registry import VARIANTS
from kvconform.run.case import run_and_judge

SPEC = load_spec()
START = {"kind": "run.start", "block_size": 4}
FAILED = {"kind": "transfer.failed", "req": "a", "is_async": False, "blocks": [5, 6]}
STEP = {"kind": "worker.step_begin"}


def numbered(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"step": 0, **event, "seq": seq} for seq, event in enumerate(events)]


def rollback(computed: int, placeholders: int, known: int) -> dict[str, Any]:
    return {
        "kind": "req.state",
        "req": "a",
        "reason": "rollback",
        "to": "RUNNING",
        "computed": computed,
        "placeholders": placeholders,
        "known": known,
    }


def alloc(*shared: int) -> dict[str, Any]:
    return {"kind": "alloc", "req": "b", "shared_blocks": list(shared)}


HEARD = rollback(0, 0, 13)
"""The engine has heard of the failed load."""


def row(start: int, tokens: int) -> dict[str, Any]:
    return {
        "kind": "req.scheduled",
        "known": 99,
        "req": "a",
        "output_computed": start,
        "scheduled": tokens,
        "table": [4, 5, 6],
    }


@pytest.mark.parametrize(
    ("event", "at"),
    [
        (rollback(0, 2, 13), 1),
        (rollback(4, 3, 18), 1),
        (rollback(0, 0, 13), None),  # as it should be
        (rollback(13, 4, 10), None),  # drafts were rejected
    ],
)
def test_tokens_in_flight_that_are_not_taken_back(event: dict[str, Any], at: int | None) -> None:
    ran = row(0, 12)
    found = lost(numbered(ran, FAILED, event))
    assert (None if found is None else found.seq - 1) == at
    assert lost(numbered(ran, {**FAILED, "is_async": True}, event)) is None
    assert lost(numbered(ran, event, FAILED)) is None
    assert lost(numbered(ran, {**FAILED, "blocks": [9]}, event)) is None  # another request's load


@pytest.mark.parametrize(
    ("between", "unfilled"),
    [
        ([], [5]),
        ([row(0, 4), STEP], [5]),
        ([row(4, 4), STEP], []),  # computed again
        ([row(4, 3), STEP], [5]),  # not to its end
        ([row(4, 3), STEP, row(7, 1), STEP], []),
        ([{"kind": "block", "op": "alloc", "id": 5}], []),  # now another request's
    ],
)
def test_blocks_that_are_served_unfilled(
    between: list[dict[str, Any]], unfilled: list[int]
) -> None:
    trace = numbered(START, FAILED, HEARD, *between, alloc(4, 5), STEP)
    note_unfilled(Trace.of(trace))
    assert trace[-2]["unfilled"] == unfilled
    assert (lost(trace) is not None) == bool(unfilled)


@pytest.mark.parametrize(
    ("again", "unfilled"),
    [
        ([], [4, 5, 6]),
        ([row(0, 5), STEP, row(5, 5), STEP], [6]),  # not to the end of what rests on the load
        ([row(0, 5), STEP, row(5, 5), STEP, row(10, 2), STEP], []),
    ],
)
def test_blocks_that_were_computed_upon_a_failed_load(
    again: list[dict[str, Any]], unfilled: list[int]
) -> None:
    failed = {**FAILED, "blocks": [4, 5]}
    trace = numbered(START, row(8, 4), failed, HEARD, *again, alloc(4, 5, 6), STEP)
    note_unfilled(Trace.of(trace))
    assert trace[-2]["unfilled"] == unfilled
    assert (lost(trace) is not None) == bool(unfilled)


def test_a_step_in_flight_upon_a_failed_load_is_no_bug_before_the_failure_arrives() -> None:
    failed = {**FAILED, "blocks": [4]}
    trace = numbered(START, row(4, 4), failed, row(8, 4), STEP, rollback(0, 0, 12))
    note_unfilled(Trace.of(trace))
    assert trace[3]["unfilled"] == [4]
    assert lost(trace) is None


def test_that_a_request_goes_on_from_what_it_computed_upon_a_failed_load_is_not_excused() -> None:
    """vLLM rolls back every request that has such a block; an engine that does not is at fault."""
    failed = {**FAILED, "blocks": [4]}
    again = [row(0, 4), STEP, row(8, 4), STEP]
    trace = numbered(START, row(4, 4), failed, rollback(0, 0, 8), *again)
    note_unfilled(Trace.of(trace))
    assert trace[-2]["unfilled"] == []
    assert lost(trace) is None


def test_blocks_of_an_engine_with_smaller_ones_are_filled_sooner() -> None:
    engines = {"kind": "run.engines", "own": {"s": {"block_size": 2}}}
    between = [FAILED, HEARD, row(4, 2), STEP, alloc(4, 5), STEP]
    trace = numbered(START, engines, *({**event, "on": "s"} for event in between))
    note_unfilled(Trace.of(trace))
    assert trace[-2]["unfilled"] == [5]
    # the same tokens lie in another block of the table
    between[2] = row(2, 2)
    trace = numbered(START, engines, *({**event, "on": "s"} for event in between))
    note_unfilled(Trace.of(trace))
    assert trace[-2]["unfilled"] == []


def test_blocks_computed_in_the_step_under_way_are_not_unfilled() -> None:
    trace = numbered(START, FAILED, HEARD, alloc(5), row(0, 12), STEP)
    note_unfilled(Trace.of(trace))
    assert trace[3]["unfilled"] == []


@pytest.mark.parametrize("heard", [[], [0], [1]])
def test_blocks_that_are_shared_before_the_failure_arrives_are_not_served(heard: list[int]) -> None:
    events = [FAILED, alloc(5)]
    for at in heard:
        events.insert(1 + at, HEARD)
    trace = numbered(START, *events, STEP)
    note_unfilled(Trace.of(trace))
    shared = next(e for e in trace if e["kind"] == "alloc")
    assert shared["unfilled"] == ([5] if heard == [0] else [])
    assert (lost(trace) is not None) == (heard == [0])


def test_a_step_that_was_scheduled_before_the_failure_arrived_is_no_bug() -> None:
    reader = {**row(8, 4), "unfilled": [5]}
    assert lost(numbered(START, FAILED, reader, rollback(0, 0, 13))) is None
    found = lost(numbered(START, FAILED, rollback(0, 0, 13), reader))
    assert found is not None and "read shared blocks" in found.why


@pytest.mark.parametrize(
    ("between", "is_lost"),
    [
        ([], True),
        ([{"kind": "block", "op": "alloc", "id": 5, "owner": "c"}], False),
        # It was handed out for the step in which its request lost its place.
        ([{"kind": "block", "op": "alloc", "id": 5, "owner": NO_OWNER}], True),
    ],
)
def test_blocks_of_a_step_that_their_request_lost_its_place_in(
    between: list[dict[str, Any]], is_lost: bool
) -> None:
    displaced = {"kind": "req.displaced", "req": "a", "published": [5]}
    found = lost(numbered(START, displaced, *between, alloc(4, 5)))
    assert (found is not None and found.who == (None, "b")) == is_lost
    assert lost(numbered(START, displaced, *between, alloc(4))) is None


def ended(step: int, kind: str = "req.finished", generation: int = 0) -> dict[str, Any]:
    return {"kind": kind, "req": "a", "generation": generation, "step": step}


@pytest.mark.parametrize("kind", ["req.finished", "sample"])
def test_output_that_is_added_to_a_finished_request(kind: str) -> None:
    found = lost(numbered(ended(3), ended(3, "sample"), ended(4, kind)))
    assert found is not None
    assert found.seq == 2
    assert "which had finished" in found.why
    assert (
        lost(
            numbered(ended(2, "sample"), ended(3), ended(3, "sample"), ended(5, kind, generation=1))
        )
        is None
    )


@pytest.mark.parametrize(
    "case", ["finding.preempted-after-failed-load", "finding.failed-load-async"]
)
def test_what_vllm_breaks_is_no_failure_of_the_connector(case: str, tmp_path: Path) -> None:
    connector, options = VARIANTS["sync"]
    variant, *_ = SPEC.cases[case].variants(["vllm"])
    report = run_and_judge(
        variant, Target(connector, {"store": "{tmp}/store", **options}), SPEC, seed=0, tmp=tmp_path
    )
    verdicts = {(row.kind, row.verdict) for row in report.rows}
    assert report.harness_error is None
    assert ("guarantee", "FAIL") in verdicts
    assert not verdicts & {
        ("requirement", "FAIL"),
        ("requirement", "BLOCKED"),
        ("requirement", "ERROR"),
    }
    if SPEC.cases[case].relations:  # else nothing is compared that could differ
        assert any("not judged" in (row.message or "") for row in report.rows)


@pytest.mark.parametrize(
    ("salt", "verdict"), [("another", "FAIL"), ("one", "UNSUPPORTED"), (None, "FAIL")]
)
def test_only_who_may_share_kv_with_a_lost_request_is_excused(
    salt: str | None, verdict: str, tmp_path: Path
) -> None:
    """The last one is offered KV of `z`, another tenant's, which has nothing of the lost one."""
    own = {} if salt is None else {"salt": salt}
    data = {
        "id": "x.y",
        "area": "identity",
        "text": "The last request comes after one that vLLM has lost count of.",
        "engines": ["vllm"],
        "matrix": {"scheduling": ["async"], "runner": ["v1"], "depth": [2]},
        "relations": [],
        "config": {"num_blocks": 64},
        "steps": [
            {"add": {"req": "a", "prompt": 18, "max_tokens": 4, "salt": "one"}},
            {"add": {"req": "z", "prompt": 18, "max_tokens": 1, "salt": "third"}},
            {"run": {}},
            {"drop-local": {}},
            {"add": {"req": "b", "prompt": {"same": "a"}, "max_tokens": 4, "salt": "one"}},
            {"fail-load": {"req": "b", "positions": [9]}},
            {"run": {}},
            {"add": {"req": "c", "prompt": {"of": "z", "tokens": 8, "then": 8}, **own}},
            {"run": {}},
        ],
    }
    case = Case.model_validate(data, strict=False)
    target = Target("kvconform.refimpl.defects.identity:NoSalt", {"store": "{tmp}/store"})
    report = run_and_judge(case.variants(["vllm"])[0], target, SPEC, seed=0, tmp=tmp_path)
    rows = {row.requirement: row for row in report.rows}
    assert "engine.placeholders-bounded" in {
        row.requirement for row in report.rows if row.verdict == "FAIL"
    }
    assert (rows["lookup.identity"].verdict, rows["lookup.identity"].req) == (verdict, "c")


ASKED = {"kind": "lookup", "req": "b", "starved": True}
END = {"kind": "run.end", "quiesced": False}


@pytest.mark.parametrize(
    ("events", "at"),
    [
        ([ASKED, ASKED, END], 1),
        ([ASKED, {"kind": "alloc", "req": "b"}, END], None),  # it was only late
        ([ASKED, {**END, "quiesced": True}], None),
        ([{**ASKED, "starved": False}, END], None),
        # The connector has not answered since.
        ([ASKED, {**ASKED, "starved": False}, END], None),
    ],
)
def test_a_retry_that_is_never_admitted(events: list[dict[str, Any]], at: int | None) -> None:
    found = lost(numbered(*events))
    assert (None if found is None else found.seq) == at


@pytest.mark.parametrize(
    ("rows", "at", "is_lost"),
    [
        ([(0, 4), (1, 7)], 5, True),  # it goes on behind what is in flight
        ([(0, 4), (1, 7)], 4, False),
        ([(1, 4)], 7, True),  # only the later step is in flight
        ([(0, 4)], 5, False),  # nothing is in flight: no known bug of vLLM
    ],
)
def test_a_request_that_shares_failed_blocks_and_has_a_later_step_in_flight(
    rows: list[tuple[int, int]], at: int, is_lost: bool
) -> None:
    mine = [{**row(start, 1), "req": "e", "step": step, "table": [4, 8]} for step, start in rows]
    failed = {**FAILED, "blocks": [4]}
    on = {**row(at, 1), "req": "e", "step": 2, "table": [4, 8]}
    trace = numbered(START, row(4, 1), *mine, failed, rollback(0, 0, 7), on)
    found = lost(trace)
    assert (found is not None) == is_lost
    if found is not None:
        assert found.seq == trace[-1]["seq"] and "request e" in found.why
    trace[0]["engine"] = "reference"  # it falls back to before all of its steps
    assert lost(trace) is None


def test_only_blocks_of_the_load_that_failed_just_now_count() -> None:
    """Block 4 failed once, was freed, and belongs to another request, which decodes."""
    again = [{**row(at, 1), "req": "e", "step": at, "table": [4, 8]} for at in (4, 5, 6, 7)]
    later = {**FAILED, "blocks": [9], "req": "c", "step": 5}
    trace = numbered(
        START,
        {**FAILED, "blocks": [4]},
        HEARD,
        {"kind": "block", "op": "alloc", "id": 4},
        *again[:3],
        later,
        {**HEARD, "req": "c"},
        again[3],
    )
    assert lost(trace) is None


@pytest.mark.parametrize("to", ["WAITING", "WAITING_FOR_STREAMING_REQ"])
def test_a_session_whose_turn_ends_when_it_was_preempted(to: str) -> None:
    turn = {"kind": "req.state", "req": "s", "from": "PREEMPTED", "to": to, "reason": "output"}
    turn |= {"computed": 0}
    found = lost(numbered(START, turn))
    assert found is not None and found.seq == 1 and "session s" in found.why
    assert lost(numbered(START, {**turn, "from": "RUNNING"})) is None
    assert lost(numbered(START, {**turn, "to": "FINISHED_STOPPED"})) is None
    assert lost(numbered({**START, "engine": "reference"}, turn)) is None


def test_a_session_whose_turn_ends_within_accepted_drafts() -> None:
    """It had 14 tokens, and got two of the four that were computed."""
    row = {"kind": "req.scheduled", "req": "s", "known": 14, "output_computed": 13, "table": [4]}
    sample = {"kind": "sample", "req": "s", "generation": 0}
    end = {"kind": "req.state", "req": "s", "from": "RUNNING", "reason": "output", "computed": 17}
    for to in ("WAITING", "WAITING_FOR_STREAMING_REQ"):
        found = lost(numbered(START, row, sample, sample, {**end, "to": to}))
        assert found is not None and found.seq == 4 and "session s" in found.why
        right = {**end, "to": to, "computed": 15}
        assert lost(numbered(START, row, sample, sample, right)) is None
