# SPDX-License-Identifier: Apache-2.0
"""Monitors: each pattern by hand, then against a naive oracle that quantifies over the whole trace, on random traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconform.evaluate import evaluate, monitor_for
from kvconform.join import hashable, split
from kvconform.monitor import KEPT, Monitor
from kvconform.requirement import Requirement

Event = dict[str, Any]
Guard = tuple[str | None, Callable[[Event, Event], bool]]


def requirement(**pattern: Any) -> Requirement:
    return Requirement.model_validate({"id": "x.y", "text": "It MUST be.", **pattern})


def run(req: Requirement, *events: Event) -> Monitor:
    return evaluate([req], [{"seq": seq, "step": 0, **event} for seq, event in enumerate(events)])[req.id]


def held(req: str = "a", direction: str = "send", **more: Any) -> Event:
    return {"k": "hold", "req": req, "direction": direction, "generation": 0, **more}


def released(req: str = "a", **more: Any) -> Event:
    return {"k": "release", "req": req, "direction": "send", "generation": 0, **more}


def reported(req: str = "a", direction: str = "send", **more: Any) -> Event:
    return {"k": "transfer.reported", "req": req, "direction": direction, "generation": 0, "rank": 0, **more}


END: Event = {"k": "run.end", "crashed": False}


def test_always_and_never() -> None:
    always = requirement(event="lookup", where="e.tokens is not None", always="e.tokens >= 0")
    found = run(always, {"k": "lookup", "tokens": None}, {"k": "lookup", "tokens": 3}, {"k": "lookup", "tokens": -4, "req": "a"}, held())
    assert (found.exercised, found.count) == (2, 1)
    violation = found.violations[0]
    assert (violation.seq, violation.event, violation.req) == (2, 2, "a")
    assert violation.message == "`e.tokens >= 0` is false: e.tokens=-4"
    never = requirement(event="lookup", never="e.tokens == 3")
    assert run(never, {"k": "lookup", "tokens": 3}).violations[0].message == "`e.tokens == 3` is true: e.tokens=3"
    at_all = requirement(event="engine.stall", never=True)
    assert run(at_all, {"k": "engine.stall"}).count == 1 and run(at_all, held()).exercised == 0


def test_count() -> None:
    req = requirement(event="transfer.reported", where="e.direction == 'recv'", count={"per": "(e.transfer, e.rank)", "max": 1})
    one = reported(direction="recv", transfer="t1")
    assert run(req, one, {**one, "rank": 1}, reported(transfer="t1"), reported(transfer="t1")).count == 0
    found = run(req, one, one, one)
    assert found.count == 2 and "2 times transfer.reported for e.transfer='t1', e.rank=0, at most 1" in found.violations[0].message
    least = requirement(event="transfer.reported", count={"per": "e.req", "min": 2})
    found = run(least, reported("a"), reported("b"), reported("b"), END)
    assert [(v.req, v.seq, v.event) for v in found.violations] == [("a", 3, 0)]
    must_occur = requirement(event="sample", count={"min": 1})
    assert run(must_occur, END).count == 1 and run(must_occur, {"k": "sample"}, END).count == 0
    unhashable = requirement(event="alloc", count={"per": "e.blocks", "max": 1})
    assert run(unhashable, {"k": "alloc", "blocks": [1, [2]]}, {"k": "alloc", "blocks": [1, [2]]}).count == 1


SAME = "e.req == t.req and e.direction == t.direction"
PRECEDE = requirement(
    event="transfer.reported",
    precede={"before": {"event": "hold", "where": SAME}, "end": {"event": "release", "where": "e.req == t.req"}},
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
    assert found.count == violations and found.exercised == sum(event["k"] == "transfer.reported" for event in events)


def test_precede_says_why() -> None:
    assert "without hold" in run(PRECEDE, reported()).violations[0].message
    found = run(PRECEDE, held(), released(), reported()).violations[0]
    assert "was over before it" in found.message and found.trigger is not None and found.trigger["seq"] == 2


RESPOND = requirement(
    event="hold",
    respond={"then": {"event": "transfer.reported", "where": "e.req == t.req and e.direction == t.direction"}, "by": "run.end"},
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
    violation = run(RESPOND, {"k": "sample"}, held(), END).violations[0]
    assert (violation.event, violation.seq) == (1, 2)
    assert violation.message == (
        "hold #1 (t.req='a', t.direction='send') was not followed by transfer.reported where"
        " `e.req == t.req and e.direction == t.direction` before run.end"
    )


def test_respond_with_a_guarded_deadline() -> None:
    req = requirement(
        event="transfer.failed",
        respond={"then": {"event": "transfer.reported"}, "by": {"event": "worker.step_end", "where": "e.forward and t.is_async"}},
    )
    failed, end = {"k": "transfer.failed", "is_async": True}, {"k": "worker.step_end", "forward": True}
    assert run(req, failed, {**end, "forward": False}, reported(), end).count == 0
    assert run(req, failed, end, reported()).count == 1
    assert run(req, {**failed, "is_async": False}, end).count == 0


def test_a_check_that_raises_is_an_error_and_stops_nobody_else() -> None:
    bad = requirement(event="lookup", always="e.tokens > 0")
    good = Requirement.model_validate({**bad.model_dump(exclude_none=True), "id": "x.good", "always": "e.local == 0"})
    events = [
        {"k": "lookup", "seq": 7, "step": 1, "tokens": None, "local": 0},
        {"k": "lookup", "seq": 8, "step": 1, "tokens": 1, "local": 1},
    ]
    for order in ([bad, good], [good, bad]):
        found = evaluate(order, events)
        error = found["x.y"].error
        assert error is not None and "lookup #7: TypeError" in error
        assert found["x.good"].error is None and found["x.good"].count == 1
    missing = run(bad, {"k": "lookup"}).error
    assert missing is not None and "it reads 'tokens', which is not there" in missing


def test_feeding_by_hand_is_the_same() -> None:
    monitor = monitor_for(PRECEDE)
    for seq, event in enumerate([held(), released(), reported(), {"k": "sample"}]):
        monitor.feed({"seq": seq, "step": 0, **event})
    monitor.finish()
    assert monitor.count == 1
    faulty = monitor_for(requirement(event="lookup", always="e.tokens > 0"))
    faulty.feed({"k": "lookup", "tokens": None})
    assert faulty.error is not None
    with pytest.raises(ValueError, match="relates two runs"):
        monitor_for(requirement(relate={"runs": ["connector", "no-connector"], "event": "sample", "project": "e.token"}))


def test_a_rule_whose_event_is_its_breach_is_exercised_by_another_event() -> None:
    req = requirement(event="kv.wrong", never="e.found == 'poison'", exercised={"event": "load.due", "where": "e.granted > 0"})
    due, wrong = {"k": "load.due", "granted": 4}, {"k": "kv.wrong", "found": "poison"}
    assert run(req, due, due, {**due, "granted": 0}).exercised == 2
    assert run(req, due, wrong).count == 1 and run(req).exercised == 0
    assert req.kinds == {"kv.wrong", "load.due"}
    same = requirement(event="hold", where="e.direction == 'send'", never="e.generation", exercised={"event": "hold"})
    assert run(same, held(), held(direction="recv")).exercised == 3  # a match of its own guard, and two at stake
    with pytest.raises(ValueError, match="unknown event"):
        requirement(event="hold", never=True, exercised={"event": "held"})
    relate = {"runs": ["connector", "repeat"], "event": "hold", "project": "e.req"}
    with pytest.raises(ValueError, match="not with `relate`"):
        requirement(relate=relate, exercised={"event": "hold"})


def test_only_so_many_violations_are_described() -> None:
    found = run(requirement(event="sample", never=True), *[{"k": "sample"}] * 50)
    assert found.count == 50 and len(found.violations) == KEPT


def test_constants_of_the_run() -> None:
    req = requirement(event="sample", always="cap.store or cfg.depth > 1")
    assert evaluate([req], [{"k": "sample"}], {"store": False}, {"depth": 2})["x.y"].count == 0
    assert evaluate([req], [{"k": "sample"}], {"store": False}, {"depth": 1})["x.y"].count == 1


# --- against the naive oracle ----------------------------------------------------------------------------------------------------------

GUARDS: list[Guard] = [
    (None, lambda e, t: True),
    ("e.req == t.req", lambda e, t: e["req"] == t["req"]),
    ("t.req == e.req and e.direction == t.direction", lambda e, t: t["req"] == e["req"] and e["direction"] == t["direction"]),
    ("e.req == t.req and e.generation >= t.generation", lambda e, t: e["req"] == t["req"] and e["generation"] >= t["generation"]),
    (
        "e.direction == 'send' and e.generation == t.generation",
        lambda e, t: e["direction"] == "send" and e["generation"] == t["generation"],
    ),
    ("e.generation < t.generation", lambda e, t: e["generation"] < t["generation"]),
    ("e.req != t.req or not e.generation", lambda e, t: e["req"] != t["req"] or not e["generation"]),
    ("e.direction == 'recv'", lambda e, t: e["direction"] == "recv"),
    ("not e.generation and t.direction == 'send'", lambda e, t: not e["generation"] and t["direction"] == "send"),
    ("e.transfer == t.transfer", lambda e, t: e["transfer"] == t["transfer"]),
]

events_strategy = st.lists(
    st.fixed_dictionaries(
        {
            "k": st.sampled_from(["hold", "release", "transfer.reported"]),
            "req": st.sampled_from("ab"),
            "direction": st.sampled_from(["send", "recv"]),
            "generation": st.integers(0, 2),
            "transfer": st.sampled_from([None, ["t", 1], ["t", 2]]),
        }
    ),
    max_size=14,
).map(lambda events: [{"seq": seq, "step": 0, **event} for seq, event in enumerate(events)])
kinds = st.sampled_from(["hold", "release", "transfer.reported"])
guards = st.sampled_from(GUARDS)
oracle_settings = settings(max_examples=100, deadline=None)


def match(kind: str, guard: Guard) -> dict[str, Any]:
    return {"event": kind} | ({} if guard[0] is None else {"where": guard[0]})


@oracle_settings
@given(events_strategy, kinds, kinds, guards, st.none() | st.tuples(kinds, guards))
def test_precede_against_the_oracle(trace: list[Event], trigger: str, kind: str, guard: Guard, end: tuple[str, Guard] | None) -> None:
    pattern: dict[str, Any] = {"before": match(kind, guard)} | ({"end": match(*end)} if end else {})
    found = evaluate([requirement(event=trigger, precede=pattern)], trace)["x.y"]

    def satisfied(i: int) -> bool:
        t = trace[i]
        for j in range(i):
            if trace[j]["k"] == kind and guard[1](trace[j], t):
                over = end is not None and any(trace[x]["k"] == end[0] and end[1][1](trace[x], t) for x in range(j + 1, i))
                if not over:
                    return True
        return False

    triggers = [i for i, event in enumerate(trace) if event["k"] == trigger]
    assert found.error is None and found.exercised == len(triggers)
    assert [violation.event for violation in found.violations] == [i for i in triggers if not satisfied(i)]


@oracle_settings
@given(events_strategy, kinds, kinds, guards, kinds, guards)
def test_respond_against_the_oracle(trace: list[Event], trigger: str, then: str, guard: Guard, by: str, deadline: Guard) -> None:
    req = requirement(event=trigger, respond={"then": match(then, guard), "by": match(by, deadline)})
    found = evaluate([req], trace)["x.y"]
    late, unresolved = set(), 0
    for i, t in enumerate(trace):
        if t["k"] != trigger:
            continue
        limit = next((x for x in range(i + 1, len(trace)) if trace[x]["k"] == by and deadline[1](trace[x], t)), None)
        last = len(trace) - 1 if limit is None else limit
        answered = any(trace[x]["k"] == then and guard[1](trace[x], t) for x in range(i + 1, last + 1))
        if not answered and limit is not None:
            late.add((i, limit))
        unresolved += not answered and limit is None
    assert found.error is None and found.unresolved == unresolved
    assert {(violation.event, violation.seq) for violation in found.violations} == late and found.count == len(late)


@oracle_settings
@given(
    events_strategy, st.none() | st.integers(1, 3), st.none() | st.integers(0, 3), st.sampled_from([None, "e.req", "(e.req, e.transfer)"])
)
def test_count_against_the_oracle(trace: list[Event], least: int | None, most: int | None, per: str | None) -> None:
    if (least is None and most is None) or (least is not None and most is not None and least > most):
        return
    bounds = {name: bound for name, bound in (("min", least), ("max", most), ("per", per)) if bound is not None}
    found = evaluate([requirement(event="hold", count=bounds)], [*trace, END])["x.y"]
    keys = {None: lambda e: 0, "e.req": lambda e: e["req"], "(e.req, e.transfer)": lambda e: (e["req"], str(e["transfer"]))}
    numbers: dict[Any, int] = {}
    for event in trace:
        if event["k"] == "hold":
            numbers[keys[per](event)] = numbers.get(keys[per](event), 0) + 1
    if per is None and not numbers:
        numbers = {0: 0}
    wanted = sum(max(0, n - most) for n in numbers.values()) if most is not None else 0
    wanted += sum(n < least for n in numbers.values()) if least is not None else 0
    assert found.count == wanted


@oracle_settings
@given(events_strategy, st.booleans())
def test_invariants_against_the_oracle(trace: list[Event], always: bool) -> None:
    req = requirement(event="hold", where="e.generation", **{"always" if always else "never": "e.req == 'a' or e.transfer"})
    found = evaluate([req], trace)["x.y"]
    matching = [event for event in trace if event["k"] == "hold" and event["generation"]]
    wrong = [event["seq"] for event in matching if bool(event["req"] == "a" or event["transfer"]) != always]
    assert found.exercised == len(matching) and [violation.event for violation in found.violations] == wrong


def test_the_join_really_uses_keys() -> None:
    """Otherwise the oracle tests would compare scanning with scanning."""
    req = requirement(event="hold", respond={"then": match("release", GUARDS[3]), "by": "run.end"})
    join = split(req.expressions["then"])
    assert join.key_e is not None and join.rest is not None and join.filter is None
    sends = split(requirement(event="hold", respond={"then": match("release", GUARDS[4]), "by": "run.end"}).expressions["then"])
    assert sends.key_e is not None and sends.filter is not None and sends.rest is None


@given(
    st.recursive(
        st.integers(0, 1) | st.sampled_from("ab"), lambda x: st.lists(x, max_size=2) | st.dictionaries(st.sampled_from("xy"), x, max_size=1)
    )
)
def test_hashable_keeps_equality(value: Any) -> None:
    import copy

    assert hash(hashable(value)) == hash(hashable(copy.deepcopy(value)))
    assert hashable([value]) == hashable([copy.deepcopy(value)]) and hashable([value]) != hashable([value, value])
