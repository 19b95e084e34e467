# SPDX-License-Identifier: Apache-2.0
"""Tests of concurrent requests as a trace shows them, and of the workload that repeats them."""

from __future__ import annotations

from typing import Any

from kvconform.run.promises import LONGEST, MOST, NOBODY, Crowd, Plain, crowd_of, plain_case

Event = dict[str, Any]


def rows(*steps: dict[str, int]) -> list[Event]:
    """Steps as request -> computed + scheduled tokens."""
    return [
        {
            "kind": "req.scheduled",
            "req": req,
            "generation": 0,
            "computed": 0,
            "scheduled": end,
            "known": 1000,
            "step": step,
        }
        for step, entries in enumerate(steps)
        for req, end in entries.items()
    ]


def crowd(events: list[Event], **lookup: Any) -> Crowd:
    for seq, event in enumerate(events):
        event["seq"] = seq
    return crowd_of(
        events, ("a", 0), {"req": "b", "generation": 0, "local": 0, "step": 9, **lookup}
    )


def alloc(req: str, external: int, step: int, is_async: bool = False) -> Event:
    return {
        "kind": "alloc",
        "req": req,
        "generation": 0,
        "external": external,
        "is_async": is_async,
        "step": step,
    }


def test_requests_stand_before_beside_or_after_the_source() -> None:
    events = rows({"p": 8}, {"a": 4, "q": 5}, {"a": 9, "q": 6}, {"r": 7, "b": 3})
    assert crowd(events, local=4) == Crowd(
        before=(8,), alongside=(6,), after=(7,), local=4, steps=8
    )
    assert crowd(rows({"a": 4}, {"b": 3}), step=0) == NOBODY
    assert crowd(rows(*({f"r{i}": 999} for i in range(80)), {"a": 4})).before == (LONGEST,) * MOST


def test_loads_count_while_they_are_under_way() -> None:
    assert crowd([alloc("p", 8, 9), alloc("q", 0, 9), alloc("r", 4, 8)]).loads == (8,)
    pending = [alloc("p", 8, 3, is_async=True), alloc("q", 12, 3, is_async=True)]
    done = {
        "kind": "transfer.reported",
        "req": "p",
        "generation": 0,
        "direction": "recv",
        "step": 5,
    }
    assert crowd(pending).loads == (8, 12)
    assert crowd([*pending, done]).loads == (12,)


def test_the_crowd_is_part_of_the_workload() -> None:
    steps = plain_case(Plain(10, 2, 10, 12, Crowd((5,), (6, 7), (8,), (9,), 4)), 4).steps
    added = [step.arg.req for step in steps if step.op == "add"]
    assert added == ["p0", "p1", "q0", "q1", "a", "r0", "r1", "r2", "w", "s0", "b"]
    # asked for again in one step with the load
    assert [step.op for step in steps[-4:]] == ["run", "add", "add", "run"]
    assert [
        step.arg.req for step in plain_case(Plain(10, 2, 10, 12), 4).steps if step.op == "add"
    ] == ["a", "b"]
