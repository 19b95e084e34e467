# SPDX-License-Identifier: Apache-2.0
"""Tests of monitors: each pattern, by hand. test_monitor_oracle.py has random traces."""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.contract.events import block_size_at
from kvconform.contract.requirement import Requirement
from kvconform.judge.evaluate import evaluate, monitor_for
from kvconform.judge.monitor import KEPT, Monitor
from monitor_rig import END, Event, requirement


def run(req: Requirement, *events: Event) -> Monitor:
    return evaluate([req], [{"seq": seq, "step": 0, **event} for seq, event in enumerate(events)])[
        req.id
    ]


def held(req: str = "a", direction: str = "send", **more: Any) -> Event:
    return {"kind": "hold", "req": req, "direction": direction, "generation": 0, **more}


def released(req: str = "a", **more: Any) -> Event:
    return {"kind": "release", "req": req, "direction": "send", "generation": 0, **more}


def reported(req: str = "a", direction: str = "send", **more: Any) -> Event:
    return {
        "kind": "transfer.reported",
        "req": req,
        "direction": direction,
        "generation": 0,
        "rank": 0,
        **more,
    }


def test_a_restart_changes_constants_of_the_run() -> None:
    """Each event is judged, and each violation worded, by the block size of its engine."""
    whole = requirement(event="lookup", always="e.local % cfg.block_size == 0")
    start = {"kind": "run.start", "block_size": 4, "hash_size": 4, "num_blocks": 9, "ranks": 1}
    trace = [
        start,
        {"kind": "lookup", "local": 4},
        {"kind": "lookup", "local": 6},
        {"kind": "run.changed", "block_size": 6, "hash_size": 6, "num_blocks": 9, "ranks": 1},
        {"kind": "lookup", "local": 6},
        {"kind": "lookup", "local": 4},
    ]
    numbered: list[Event] = [{"seq": seq, "step": 0, **e} for seq, e in enumerate(trace)]
    found = evaluate([whole], numbered, cfg=start)["x.y"]
    assert [each.seq for each in found.violations] == [2, 5]
    assert start["block_size"] == 4
    assert [block_size_at(numbered, numbered[seq]) for seq in (0, 2, 3, 5)] == [4, 4, 6, 6]


def test_one_of_several_engines_may_have_blocks_of_its_own() -> None:
    trace = [
        {"kind": "run.start", "block_size": 4, "seq": 0},
        {"kind": "run.engines", "own": {"d": {"block_size": 8}}, "seq": 1},
        *({"kind": "lookup", "on": on, "seq": 2 + index} for index, on in enumerate("pd")),
    ]
    assert [block_size_at(trace, event) for event in trace[2:]] == [4, 8]


def test_the_check_of_a_violation_is_worded_with_the_constants_of_its_time() -> None:
    check = requirement(
        event="lookup", always="cfg.block_size == 8 or e.local % cfg.block_size == 0"
    )
    start = {"kind": "run.start", "block_size": 4, "hash_size": 4, "num_blocks": 9, "ranks": 1}
    changed = {"kind": "run.changed", "block_size": 8, "hash_size": 8, "num_blocks": 9, "ranks": 1}
    events = [start, {"kind": "lookup", "local": 6}, changed]
    trace = [{"seq": seq, "step": 0, **event} for seq, event in enumerate(events)]
    (violation,) = evaluate([check], trace, cfg=start)["x.y"].violations
    assert "is false" in violation.message and "e.local=6" in violation.message


def test_always_and_never() -> None:
    always = requirement(event="lookup", where="e.tokens is not None", always="e.tokens >= 0")
    found = run(
        always,
        {"kind": "lookup", "tokens": None},
        {"kind": "lookup", "tokens": 3},
        {"kind": "lookup", "tokens": -4, "req": "a"},
        held(),
    )
    assert (found.exercised, found.count) == (2, 1)
    violation = found.violations[0]
    assert (violation.seq, violation.event, violation.req) == (2, 2, "a")
    assert violation.message == "`e.tokens >= 0` is false: e.tokens=-4"
    never = requirement(event="lookup", never="e.tokens == 3")
    assert (
        run(never, {"kind": "lookup", "tokens": 3}).violations[0].message
        == "`e.tokens == 3` is true: e.tokens=3"
    )
    at_all = requirement(event="engine.stall", never=True)
    assert run(at_all, {"kind": "engine.stall"}).count == 1 and run(at_all, held()).exercised == 0


def test_count() -> None:
    req = requirement(
        event="transfer.reported",
        where="e.direction == 'recv'",
        count={"per": "(e.transfer, e.rank)", "max": 1},
    )
    one = reported(direction="recv", transfer="t1")
    assert (
        run(req, one, {**one, "rank": 1}, reported(transfer="t1"), reported(transfer="t1")).count
        == 0
    )
    found = run(req, one, one, one)
    assert (
        found.count == 2
        and "2 times transfer.reported for e.transfer='t1', e.rank=0, at most 1"
        in found.violations[0].check
    )
    later = run(req, {**one, "step": 3}, {**one, "step": 5})
    assert later.violations[0].message == "this is number 2, and the first was in step 3"
    least = requirement(event="transfer.reported", count={"per": "e.req", "min": 2})
    found = run(least, reported("a"), reported("b"), reported("b"), END)
    assert [(v.req, v.seq, v.event) for v in found.violations] == [("a", 3, 0)]
    must_occur = requirement(event="sample", count={"min": 1})
    assert run(must_occur, END).count == 1 and run(must_occur, {"kind": "sample"}, END).count == 0
    unhashable = requirement(event="alloc", count={"per": "e.blocks", "max": 1})
    assert (
        run(
            unhashable, {"kind": "alloc", "blocks": [1, [2]]}, {"kind": "alloc", "blocks": [1, [2]]}
        ).count
        == 1
    )


SAME = "e.req == t.req and e.direction == t.direction"
PRECEDE = requirement(
    event="transfer.reported",
    precede={
        "before": {"event": "hold", "where": SAME},
        "end": {"event": "release", "where": "e.req == t.req"},
    },
)


@pytest.mark.parametrize(
    ("events", "violations"),
    [
        ([held(), reported()], 0),
        ([reported()], 1),
        ([reported(), held()], 1),
        ([held(), released(), reported()], 1),
        ([held(), released("b"), reported()], 0),
        ([held(), released(), held(), reported()], 0),
        ([held("b"), reported("a")], 1),
        ([held(direction="recv"), reported()], 1),
        ([held(), reported(), reported(), released(), reported()], 1),
    ],
)
def test_precede(events: list[Event], violations: int) -> None:
    found = run(PRECEDE, *events)
    assert found.count == violations and found.exercised == sum(
        event["kind"] == "transfer.reported" for event in events
    )


def test_precede_says_why() -> None:
    assert "without hold" in run(PRECEDE, reported()).violations[0].message
    found = run(PRECEDE, held(), released(), reported()).violations[0]
    assert "was over before it" in found.message and found.event == 2


RESPOND = requirement(
    event="hold",
    respond={
        "then": {
            "event": "transfer.reported",
            "where": "e.req == t.req and e.direction == t.direction",
        },
        "by": "run.end",
    },
)


@pytest.mark.parametrize(
    ("events", "violations", "unresolved"),
    [
        ([held(), reported(), END], 0, 0),
        ([held(), END], 1, 0),
        ([held()], 0, 1),
        ([held(), END, reported()], 1, 0),
        ([reported(), held(), END], 1, 0),
        ([held(), held(), reported(), END], 0, 0),
        ([held("a"), held("b"), reported("b"), END], 1, 0),
        ([held("a"), reported("a"), held("a"), END], 1, 0),
    ],
)
def test_respond(events: list[Event], violations: int, unresolved: int) -> None:
    found = run(RESPOND, *events)
    assert (found.count, found.unresolved) == (violations, unresolved)


def test_respond_points_at_the_trigger_and_blames_the_deadline() -> None:
    violation = run(RESPOND, {"kind": "sample"}, held(), END).violations[0]
    assert (violation.event, violation.seq) == (1, 2)
    assert violation.message == (
        "hold in step 0 (t.req='a', t.direction='send') was not followed by transfer.reported where"
        " `e.req == t.req and e.direction == t.direction` before run.end"
    )


def test_respond_with_a_guarded_deadline() -> None:
    req = requirement(
        event="transfer.failed",
        respond={
            "then": {"event": "transfer.reported"},
            "by": {"event": "worker.step_end", "where": "e.forward and t.is_async"},
        },
    )
    failed, end = (
        {"kind": "transfer.failed", "is_async": True},
        {"kind": "worker.step_end", "forward": True},
    )
    assert run(req, failed, {**end, "forward": False}, reported(), end).count == 0
    assert run(req, failed, end, reported()).count == 1
    assert run(req, {**failed, "is_async": False}, end).count == 0


def test_a_check_that_raises_is_an_error_and_stops_nobody_else() -> None:
    bad = requirement(event="lookup", always="e.tokens > 0")
    good = Requirement.model_validate(
        {**bad.model_dump(exclude_none=True), "id": "x.good", "always": "e.local == 0"}
    )
    events = [
        {"kind": "lookup", "seq": 7, "step": 1, "tokens": None, "local": 0},
        {"kind": "lookup", "seq": 8, "step": 1, "tokens": 1, "local": 1},
    ]
    for order in ([bad, good], [good, bad]):
        found = evaluate(order, events)
        error = found["x.y"].error
        assert error is not None and "lookup #7: TypeError" in error
        assert found["x.good"].error is None and found["x.good"].count == 1
    missing = run(bad, {"kind": "lookup"}).error
    assert missing is not None and "it reads 'tokens', which is not there" in missing


def test_related_runs_have_no_monitor() -> None:
    with pytest.raises(ValueError, match="relates two runs"):
        monitor_for(
            requirement(
                relate={
                    "runs": ["connector", "no-connector"],
                    "event": "sample",
                    "project": "e.token",
                }
            )
        )


def test_a_rule_whose_event_is_its_breach_is_exercised_by_another_event() -> None:
    req = requirement(
        event="kv.wrong",
        never="e.found == 'poison'",
        exercised={"event": "load.due", "where": "e.granted > 0"},
    )
    due, wrong = {"kind": "load.due", "granted": 4}, {"kind": "kv.wrong", "found": "poison"}
    assert run(req, due, due, {**due, "granted": 0}).exercised == 2
    assert run(req, due, wrong).count == 1 and run(req).exercised == 0
    assert req.kinds == {"kv.wrong", "load.due"}
    same = requirement(
        event="hold",
        where="e.direction == 'send'",
        never="e.generation",
        exercised={"event": "hold"},
    )
    # a match of its own guard, and two at stake
    assert run(same, held(), held(direction="recv")).exercised == 3
    with pytest.raises(ValueError, match="unknown event"):
        requirement(event="hold", never=True, exercised={"event": "held"})
    relate = {"runs": ["connector", "repeat"], "event": "hold", "project": "e.req"}
    with pytest.raises(ValueError, match="not with `relate`"):
        requirement(relate=relate, exercised={"event": "hold"})


def test_only_so_many_violations_are_described() -> None:
    found = run(requirement(event="sample", never=True), *[{"kind": "sample"}] * 50)
    assert found.count == 50 and len(found.violations) == KEPT


def test_constants_of_the_run() -> None:
    req = requirement(event="sample", always="cap.store or cfg.depth > 1")
    assert evaluate([req], [{"kind": "sample"}], {"store": False}, {"depth": 2})["x.y"].count == 0
    assert evaluate([req], [{"kind": "sample"}], {"store": False}, {"depth": 1})["x.y"].count == 1
