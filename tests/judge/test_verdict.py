# SPDX-License-Identifier: Apache-2.0
"""Tests of the verdicts of a run and of blame. test_aggregate.py combines several verdicts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from kvconform.contract.requirement import Requirement
from kvconform.judge.records import Row, Verdict
from kvconform.judge.verdict import CRASH, rows_for
from verdict_rig import (
    END,
    FakeRun,
    FakeVariant,
    lookup,
    requirement,
    trace,
    verdicts,
)

CRASHED = {
    "kind": "engine.crash",
    "where": "hook",
    "error": "KeyError",
    "hook": "request_finished",
}


def verdict(req: Requirement, *events: dict[str, Any], **options: Any) -> Verdict:
    return verdicts([req], *events, **options)[req.id].verdict


def test_pass_fail_and_silence() -> None:
    req = requirement("a.b")
    assert verdict(req, lookup()) is Verdict.PASS
    assert verdict(req, lookup(False)) is Verdict.FAIL
    assert verdict(req) is Verdict.NOT_EXERCISED


def test_a_failure_says_where_and_why() -> None:
    row = verdicts([requirement("a.b")], lookup(), lookup(False), lookup(False))["a.b"]
    assert (row.step, row.event, row.req, row.count, row.exercised) == (1, 2, "a", 2, 3)
    assert row.message == "`e.type_ok` is false: e.type_ok=False" and row.evidence == "v1/x.py: X.y"
    assert (row.case, row.engine, row.depth, row.kind, row.level, row.gating) == (
        "lifecycle.one",
        "reference",
        1,
        "requirement",
        "MUST",
        True,
    )


def test_what_is_not_judged() -> None:
    assert verdict(requirement("a.b", capability="store"), lookup(False)) is Verdict.UNSUPPORTED
    assert (
        verdict(requirement("a.b", capability="store"), lookup(False), caps={"store": True})
        is Verdict.FAIL
    )
    assert verdict(requirement("a.b", needs=["plan"]), lookup(False)) is Verdict.UNOBSERVABLE
    assert (
        verdict(
            requirement("a.b", event="kv.wrong", never="e.count"),
            run={"channels": frozenset({"sched"})},
        )
        is Verdict.UNOBSERVABLE
    )
    assert verdict(requirement("a.b", engines=["vllm"]), lookup(False)) is Verdict.UNOBSERVABLE
    assert verdict(requirement("a.b"), lookup(False), disabled={"a.b"}) is Verdict.DISABLED
    assert (
        verdict(
            requirement("a.b", event="run.end", always="e.free_blocks"),
            END,
            run={"channels": frozenset()},
        )
        is Verdict.PASS
    )


def test_errors_of_the_harness_hit_every_row() -> None:
    reqs = [requirement("a.b"), requirement("a.c", capability="store")]
    for found in (
        verdicts(reqs, lookup(False), run={"harness_error": "boom"}),
        verdicts(reqs, lookup(False), runs={"no-connector": FakeRun([], harness_error="boom")}),
        verdicts(reqs, lookup(False), {**CRASHED, "where": "harness", "error": "boom"}),
    ):
        assert {row.verdict for row in found.values()} == {Verdict.ERROR} and all(
            "boom" in (row.message or "") for row in found.values()
        )


def test_a_check_that_raises_is_an_error_of_that_row_only() -> None:
    found = verdicts(
        [requirement("a.b", always="e.tokens > 0"), requirement("a.c")], lookup(tokens=None)
    )
    assert (
        found["a.b"].verdict is Verdict.ERROR
        and "TypeError" in (found["a.b"].message or "")
        and found["a.c"].verdict is Verdict.PASS
    )


def test_a_consequence_is_blocked_by_an_earlier_failure() -> None:
    cause = requirement("a.cause")
    later = requirement(
        "a.later",
        event="run.end",
        always="e.free_blocks == e.free_blocks_at_start",
        consequence=True,
    )
    leak = {**END, "free_blocks": 0}
    for order in ([cause, later], [later, cause]):
        found = verdicts(order, lookup(False), leak)
        assert found["a.cause"].verdict is Verdict.FAIL
        assert (found["a.later"].verdict, found["a.later"].blocked_by) == (
            Verdict.BLOCKED,
            "a.cause",
        )
    assert verdicts([cause, later], lookup(), leak)["a.later"].verdict is Verdict.FAIL


def test_a_consequence_is_not_blocked_by_what_came_later_or_only_should() -> None:
    effect = requirement("a.effect", event="sample", always="e.clean", consequence=True)
    sample = {"kind": "sample", "index": 0, "clean": False, "req": "a", "generation": 0}
    assert (
        verdicts([requirement("a.cause"), effect], sample, lookup(False))["a.effect"].verdict
        is Verdict.FAIL
    )
    assert (
        verdicts([requirement("a.cause", level="SHOULD"), effect], lookup(False), sample)[
            "a.effect"
        ].verdict
        is Verdict.FAIL
    )
    # The first of its violations is its own, the second explained: it fails, for the first.
    row = verdicts([requirement("a.cause"), effect], sample, lookup(False), sample)["a.effect"]
    assert row.verdict is Verdict.FAIL and row.event == 1 and row.count == 2


def test_a_chain_of_consequences_has_one_root() -> None:
    first = requirement("a.first", event="sample", always="e.clean", consequence=True)
    second = requirement("a.second", event="run.end", always="e.free_blocks", consequence=True)
    events = (
        {"kind": "sample", "index": 0, "clean": False, "req": "a", "generation": 0},
        {**END, "free_blocks": 0},
    )
    found = verdicts([second, first], *events)
    assert found["a.first"].verdict is Verdict.FAIL and found["a.second"].blocked_by == "a.first"
    found = verdicts([second, first, requirement("a.root")], lookup(False), *events)
    assert found["a.first"].blocked_by == found["a.second"].blocked_by == "a.root"


PENDING = {
    "event": "hold",
    "respond": {"then": {"event": "transfer.reported", "where": "e.req == t.req"}, "by": "run.end"},
}
HOLD = {"kind": "hold", "req": "a", "generation": 0, "direction": "send"}


def test_after_a_crash_nothing_is_blamed_on_what_came_after() -> None:
    end = requirement("a.end", event="run.end", always="e.free_blocks")
    pending = requirement("a.pending", **PENDING)
    crash = requirement("a.crash", event="engine.crash", never=True, consequence=True)
    events = (lookup(False), HOLD, CRASHED, {**END, "crashed": True, "free_blocks": 0})
    found = verdicts([end, pending, crash, requirement("a.cause")], *events)
    assert {name: (row.verdict, row.blocked_by) for name, row in found.items()} == {
        "a.cause": (Verdict.FAIL, None),
        "a.crash": (Verdict.BLOCKED, "a.cause"),
        "a.end": (Verdict.BLOCKED, "a.cause"),
        "a.pending": (Verdict.BLOCKED, "a.cause"),
    }
    found = verdicts([end, pending, crash, requirement("a.cause")], lookup(), *events[1:])
    assert found["a.crash"].verdict is Verdict.FAIL and found["a.cause"].verdict is Verdict.PASS
    assert found["a.end"].blocked_by == found["a.pending"].blocked_by == "a.crash"


@pytest.mark.parametrize("req", ["a", "b"])
def test_a_guarantee_for_a_request_is_explained_by_a_wrong_answer_to_its_lookup(req: str) -> None:
    answers = requirement("lookup.last-token")
    promised = requirement("engine.b", kind="guarantee", event="transfer.reported", never=True)
    reported = {"kind": "transfer.reported", "req": req}
    found = verdicts([answers, promised], lookup(False), reported)
    assert found["lookup.last-token"].verdict is Verdict.FAIL
    assert (found["engine.b"].verdict, found["engine.b"].blocked_by) == (
        (Verdict.BLOCKED, "lookup.last-token") if req == "a" else (Verdict.FAIL, None)
    )


def test_what_a_crash_cut_short_is_blamed_on_the_hook_that_raised() -> None:
    raises = requirement("hook.no-raise", event="transfer.reported", never=True)
    pending = requirement("a.pending", **PENDING)
    events = (lookup(False), HOLD, {"kind": "transfer.reported", "req": "b"}, CRASHED)
    found = verdicts([raises, pending, requirement("a.cause")], *events)
    assert (found["a.cause"].verdict, found["a.pending"].blocked_by) == (
        Verdict.FAIL,
        "hook.no-raise",
    )


def test_obligations_that_a_crash_cut_short() -> None:
    for by in ("worker.step_end", "run.end"):
        req = requirement(
            "a.b", event="hold", respond={"then": {"event": "transfer.reported"}, "by": by}
        )
        row = verdicts([req], HOLD, CRASHED)["a.b"]
        assert (row.verdict, row.blocked_by) == (Verdict.BLOCKED, CRASH)
    assert (
        verdict(
            requirement("a.b", **PENDING), HOLD, {"kind": "transfer.reported", "req": "a"}, CRASHED
        )
        is Verdict.PASS
    )
    assert verdict(requirement("a.b", **PENDING), HOLD, END) is Verdict.FAIL
    # A run that only says that it crashed is treated alike.
    assert verdict(requirement("a.b", **PENDING), HOLD, {**END, "crashed": True}) is Verdict.BLOCKED


def test_relations_are_judged_over_the_runs() -> None:
    relate = {"runs": ["connector", "no-connector"], "event": "sample", "project": "e.token"}
    req = requirement("compose.null-effect", relate=relate, consequence=True)
    other = FakeRun(trace({"kind": "sample", "index": 0, "req": "a", "generation": 0, "token": 5}))
    assert (
        verdict(
            req,
            {"kind": "sample", "index": 0, "req": "a", "generation": 0, "token": 5},
            runs={"no-connector": other},
        )
        is Verdict.PASS
    )
    assert (
        verdict(
            req,
            {"kind": "sample", "index": 0, "req": "a", "generation": 0, "token": 6},
            runs={"no-connector": other},
        )
        is Verdict.FAIL
    )
    assert (
        verdict(req, {"kind": "sample", "index": 0, "req": "a", "generation": 0, "token": 5})
        is Verdict.UNOBSERVABLE
    )
    assert verdict(req, runs={"no-connector": FakeRun([])}) is Verdict.NOT_EXERCISED
    found = verdicts(
        [requirement("a.b"), req],
        lookup(False),
        {"kind": "sample", "index": 0, "req": "a", "generation": 0, "token": 6},
        runs={"no-connector": other},
    )
    assert found["compose.null-effect"].blocked_by == "a.b"


def test_what_counts_against_the_connector() -> None:
    reqs = [
        requirement("a.must"),
        requirement("a.should", level="SHOULD"),
        requirement("engine.g", kind="guarantee"),
    ]
    assert [row.gating for row in verdicts(reqs, lookup(False)).values()] == [True, False, False]
    assert [row.gating for row in verdicts(reqs, lookup(False), strict=True).values()] == [
        True,
        True,
        False,
    ]
    assert {row.verdict for row in verdicts(reqs, lookup(False)).values()} == {Verdict.FAIL}


def test_rows_survive_json_and_match_the_report() -> None:
    rows = list(
        verdicts(
            [requirement("a.b"), requirement("a.c", **PENDING)], lookup(False), HOLD, CRASHED
        ).values()
    )
    for row in rows:
        assert Row.from_dict({"type": "row", **row.to_dict()}) == row
        assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row
    assert "blocked_by" not in rows[0].to_dict() and "type" not in rows[0].to_dict()
    with pytest.raises(ValidationError):
        Row.from_dict({**rows[0].to_dict(), "verdict": "MAYBE"})
    with pytest.raises(ValidationError):
        Row.from_dict({**rows[0].to_dict(), "unknown": 1})
    found = rows_for([requirement("a.b")], FakeVariant(), Verdict.UNSUPPORTED, "needs store")
    assert found[0].verdict is Verdict.UNSUPPORTED and found[0].message == "needs store"


LOST = (
    {"kind": "req.scheduled", "req": "a", "table": [4, 5], "output_computed": 0},
    {"kind": "transfer.failed", "req": "a", "is_async": False, "blocks": [5]},
    {
        "kind": "req.state",
        "req": "a",
        "reason": "rollback",
        "to": "RUNNING",
        "computed": 0,
        "placeholders": 2,
        "known": 13,
    },
)


def test_what_came_before_the_engine_lost_track_is_still_judged() -> None:
    before = verdicts([requirement("a.b")], lookup(False), *LOST, lookup(False))["a.b"]
    assert (before.verdict, before.event) == (Verdict.FAIL, 1)
    after = verdicts([requirement("a.b")], lookup(), *LOST, lookup(False))["a.b"]
    assert after.verdict is Verdict.UNSUPPORTED
    assert "lost count of request a" in (after.message or "")


def test_an_obligation_that_was_open_when_the_engine_lost_track_is_not_judged() -> None:
    req = requirement(
        "a.b",
        respond={
            "then": {"event": "sample", "where": "e.req == t.req"},
            "by": {"event": "run.end", "where": "not e.crashed"},
        },
    )
    open_at_the_end = [lookup(), *LOST, END]
    overdue_before = [lookup(), END, *LOST]
    assert verdict(req, lookup(), END) is Verdict.FAIL
    assert verdict(req, *open_at_the_end) is Verdict.UNSUPPORTED
    assert verdict(req, *overdue_before) is Verdict.FAIL


def test_a_comparison_with_a_run_that_lost_track_is_not_judged() -> None:
    relate = {"runs": ["connector", "no-connector"], "event": "sample", "project": "e.token"}
    req = requirement("compose.null-effect", relate=relate)
    other = FakeRun(trace({"kind": "sample", "req": "b", "generation": 0, "index": 0, "token": 5}))
    sample = {"kind": "sample", "req": "b", "generation": 0, "index": 0, "token": 6}
    assert verdicts([req], sample, runs={"no-connector": other})[req.id].verdict is Verdict.FAIL
    assert (
        verdicts([req], sample, *LOST, runs={"no-connector": other})[req.id].verdict
        is Verdict.UNSUPPORTED
    )


def test_a_broken_prohibition_explains_consequences_too() -> None:
    cause = requirement("a.cause", level="MUST NOT", text="It MUST NOT be.")
    effect = requirement("a.effect", event="run.end", always="e.free_blocks", consequence=True)
    found = verdicts([effect, cause], lookup(False), {**END, "free_blocks": 0})
    assert found["a.cause"].verdict is Verdict.FAIL
    assert (found["a.effect"].verdict, found["a.effect"].blocked_by) == (Verdict.BLOCKED, "a.cause")


def built(output_mutated: bool, **more: Any) -> dict[str, Any]:
    return {"kind": "meta.built", "output_mutated": output_mutated, **more}


UNTOUCHED = requirement(
    "meta.output-untouched", level="MUST NOT", event="meta.built", never="e.output_mutated"
)
GUARANTEE = requirement("engine.tells", kind="guarantee")


@pytest.mark.parametrize("requirements", [[UNTOUCHED, GUARANTEE], [GUARANTEE, UNTOUCHED]])
def test_what_the_engine_does_with_a_changed_output_is_not_its_fault(
    requirements: list[Requirement],
) -> None:
    found = verdicts(requirements, lookup(), built(True), lookup(False))
    assert found["meta.output-untouched"].verdict is Verdict.FAIL
    row = found["engine.tells"]
    assert (row.verdict, row.blocked_by) == (Verdict.BLOCKED, "meta.output-untouched")


def test_what_the_engine_does_with_an_output_of_its_own_is_its_fault() -> None:
    for events in (
        [built(False), lookup(False)],
        [lookup(False), built(True)],
        [lookup(False), built(True), lookup(False)],
    ):
        assert verdicts([UNTOUCHED, GUARANTEE], *events)["engine.tells"].verdict is Verdict.FAIL


@pytest.mark.parametrize(("engine", "expected"), [("p", Verdict.BLOCKED), ("c", Verdict.FAIL)])
def test_a_changed_output_concerns_its_own_engine(engine: str, expected: Verdict) -> None:
    roles = {"kind": "run.engines", "engines": {"p": "kv_producer", "c": "kv_consumer"}}
    events = [roles, built(True, on="p"), lookup(False, on=engine)]
    assert verdicts([UNTOUCHED, GUARANTEE], *events)["engine.tells"].verdict is expected


def test_an_engine_that_lost_track_by_a_changed_output_is_no_excuse() -> None:
    reqs = [UNTOUCHED, requirement("a.b")]
    own = verdicts(reqs, *LOST, built(True), lookup(False))
    assert own["a.b"].verdict is Verdict.UNSUPPORTED
    theirs = verdicts(reqs, built(True), *LOST, lookup(False))
    assert theirs["a.b"].verdict is Verdict.FAIL


def test_a_changed_output_explains_no_requirement() -> None:
    found = verdicts([UNTOUCHED, requirement("a.b")], built(True), lookup(False))
    assert found["a.b"].verdict is Verdict.FAIL


OUTSIDE = requirement(
    "load.errors-within-grant", level="MUST NOT", event="transfer.failed", never="e.outside_grant"
)


def reported(*blocks: int) -> dict[str, Any]:
    """A report of failed blocks that no load was to fill."""
    return {
        "kind": "transfer.failed",
        "req": None,
        "is_async": False,
        "blocks": list(blocks),
        "outside_grant": list(blocks),
    }


def test_what_the_engine_does_upon_a_report_of_other_blocks_is_not_its_fault() -> None:
    found = verdicts([OUTSIDE, GUARANTEE, requirement("a.b")], reported(9), lookup(False))
    row = found["engine.tells"]
    assert (row.verdict, row.blocked_by) == (Verdict.BLOCKED, "load.errors-within-grant")
    assert found["a.b"].verdict is Verdict.FAIL, "it explains no requirement"
    before = verdicts([OUTSIDE, GUARANTEE], lookup(False), reported(9))
    assert before["engine.tells"].verdict is Verdict.FAIL


def test_what_is_taken_back_explains_no_guarantee() -> None:
    """The engine had lost track of a request before blocks were reported."""
    lost = [{**each, "outside_grant": []} for each in LOST]
    found = verdicts([OUTSIDE, GUARANTEE], *lost, reported(9), lookup(False))
    assert found["load.errors-within-grant"].verdict is Verdict.UNSUPPORTED
    assert found["engine.tells"].verdict is Verdict.FAIL
    broken = requirement("hook.no-raise", event="sample", always="e.token")
    sample = {"kind": "sample", "req": "a", "generation": 0, "token": 0}
    crash = {"kind": "engine.crash", "where": "engine", "error": "x", "hook": None}
    crashed = verdicts([broken, GUARANTEE], *lost, sample, crash, lookup(False))
    assert crashed["hook.no-raise"].verdict is Verdict.UNSUPPORTED
    assert crashed["engine.tells"].verdict is Verdict.BLOCKED, "the crash still explains it"
    after = verdicts([OUTSIDE, requirement("a.b")], reported(9), *lost, lookup(False))
    assert after["a.b"].verdict is Verdict.UNSUPPORTED, "a report changes no objects"
