# SPDX-License-Identifier: Apache-2.0
"""Tests of monitors on random traces, against a naive oracle that searches the whole trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvconform.judge.evaluate import evaluate
from kvconform.judge.guards import hashable, split
from monitor_rig import END, Event, requirement

Guard = tuple[str | None, Callable[[Event, Event], bool]]

GUARDS: list[Guard] = [
    (None, lambda e, t: True),
    ("e.req == t.req", lambda e, t: e["req"] == t["req"]),
    (
        "t.req == e.req and e.direction == t.direction",
        lambda e, t: t["req"] == e["req"] and e["direction"] == t["direction"],
    ),
    (
        "e.req == t.req and e.generation >= t.generation",
        lambda e, t: e["req"] == t["req"] and e["generation"] >= t["generation"],
    ),
    (
        "e.direction == 'send' and e.generation == t.generation",
        lambda e, t: e["direction"] == "send" and e["generation"] == t["generation"],
    ),
    ("e.generation < t.generation", lambda e, t: e["generation"] < t["generation"]),
    (
        "e.req != t.req or not e.generation",
        lambda e, t: e["req"] != t["req"] or not e["generation"],
    ),
    ("e.direction == 'recv'", lambda e, t: e["direction"] == "recv"),
    (
        "not e.generation and t.direction == 'send'",
        lambda e, t: not e["generation"] and t["direction"] == "send",
    ),
    ("e.transfer == t.transfer", lambda e, t: e["transfer"] == t["transfer"]),
]

events_strategy = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["hold", "release", "transfer.reported"]),
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
oracle_settings = settings(max_examples=100)


def match(kind: str, guard: Guard) -> dict[str, Any]:
    return {"event": kind} | ({} if guard[0] is None else {"where": guard[0]})


@oracle_settings
@given(events_strategy, kinds, kinds, guards, st.none() | st.tuples(kinds, guards))
def test_precede_against_the_oracle(
    trace: list[Event], trigger: str, kind: str, guard: Guard, end: tuple[str, Guard] | None
) -> None:
    pattern: dict[str, Any] = {"before": match(kind, guard)} | ({"end": match(*end)} if end else {})
    found = evaluate([requirement(event=trigger, precede=pattern)], trace)["x.y"]

    def satisfied(i: int) -> bool:
        t = trace[i]
        for j in range(i):
            if trace[j]["kind"] == kind and guard[1](trace[j], t):
                over = end is not None and any(
                    trace[x]["kind"] == end[0] and end[1][1](trace[x], t) for x in range(j + 1, i)
                )
                if not over:
                    return True
        return False

    triggers = [i for i, event in enumerate(trace) if event["kind"] == trigger]
    assert found.error is None and found.exercised == len(triggers)
    assert [violation.event for violation in found.violations] == [
        i for i in triggers if not satisfied(i)
    ]


@oracle_settings
@given(events_strategy, kinds, kinds, guards, kinds, guards)
def test_respond_against_the_oracle(
    trace: list[Event], trigger: str, then: str, guard: Guard, by: str, deadline: Guard
) -> None:
    req = requirement(
        event=trigger, respond={"then": match(then, guard), "by": match(by, deadline)}
    )
    found = evaluate([req], trace)["x.y"]
    late, unresolved = set(), 0
    for i, t in enumerate(trace):
        if t["kind"] != trigger:
            continue
        limit = next(
            (
                x
                for x in range(i + 1, len(trace))
                if trace[x]["kind"] == by and deadline[1](trace[x], t)
            ),
            None,
        )
        last = len(trace) - 1 if limit is None else limit
        answered = any(
            trace[x]["kind"] == then and guard[1](trace[x], t) for x in range(i + 1, last + 1)
        )
        if not answered and limit is not None:
            late.add((i, limit))
        unresolved += not answered and limit is None
    assert found.error is None and found.unresolved == unresolved
    assert {
        (violation.event, violation.seq) for violation in found.violations
    } == late and found.count == len(late)


@oracle_settings
@given(
    events_strategy,
    st.none() | st.integers(1, 3),
    st.none() | st.integers(0, 3),
    st.sampled_from([None, "e.req", "(e.req, e.transfer)"]),
)
def test_count_against_the_oracle(
    trace: list[Event], least: int | None, most: int | None, per: str | None
) -> None:
    if (least is None and most is None) or (
        least is not None and most is not None and least > most
    ):
        return
    bounds = {
        name: bound
        for name, bound in (("min", least), ("max", most), ("per", per))
        if bound is not None
    }
    found = evaluate([requirement(event="hold", count=bounds)], [*trace, END])["x.y"]
    keys = {
        None: lambda e: 0,
        "e.req": lambda e: e["req"],
        "(e.req, e.transfer)": lambda e: (e["req"], str(e["transfer"])),
    }
    numbers: dict[Any, int] = {}
    for event in trace:
        if event["kind"] == "hold":
            numbers[keys[per](event)] = numbers.get(keys[per](event), 0) + 1
    if per is None and not numbers:
        numbers = {0: 0}
    wanted = sum(max(0, n - most) for n in numbers.values()) if most is not None else 0
    wanted += sum(n < least for n in numbers.values()) if least is not None else 0
    assert found.count == wanted


@oracle_settings
@given(events_strategy, st.booleans())
def test_invariants_against_the_oracle(trace: list[Event], always: bool) -> None:
    req = requirement(
        event="hold",
        where="e.generation",
        **{"always" if always else "never": "e.req == 'a' or e.transfer"},
    )
    found = evaluate([req], trace)["x.y"]
    matching = [event for event in trace if event["kind"] == "hold" and event["generation"]]
    wrong = [
        event["seq"]
        for event in matching
        if bool(event["req"] == "a" or event["transfer"]) != always
    ]
    assert (
        found.exercised == len(matching)
        and [violation.event for violation in found.violations] == wrong
    )


def test_the_join_really_uses_keys() -> None:
    """Otherwise the oracle tests would compare scanning with scanning."""
    req = requirement(event="hold", respond={"then": match("release", GUARDS[3]), "by": "run.end"})
    join = split(req.expressions["then"])
    assert join.key_e is not None and join.rest is not None and join.filter is None
    sends = split(
        requirement(
            event="hold", respond={"then": match("release", GUARDS[4]), "by": "run.end"}
        ).expressions["then"]
    )
    assert sends.key_e is not None and sends.filter is not None and sends.rest is None


@given(
    st.recursive(
        st.integers(0, 1) | st.sampled_from("ab"),
        lambda x: st.lists(x, max_size=2) | st.dictionaries(st.sampled_from("xy"), x, max_size=1),
    )
)
def test_hashable_keeps_equality(value: Any) -> None:
    import copy

    assert hash(hashable(value)) == hash(hashable(copy.deepcopy(value)))
    assert hashable([value]) == hashable([copy.deepcopy(value)]) and hashable([value]) != hashable(
        [value, value]
    )
