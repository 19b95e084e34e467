# SPDX-License-Identifier: Apache-2.0
"""Tests that a timeline shows what the trace says."""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.contract.events import EVENTS
from kvconform.judge.records import Row, Verdict
from kvconform.report.html.lanes import PIECES
from kvconform.report.html.story import LONGEST, build, pack, story_of, unpack


def trace(*events: tuple[str, int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Events with all their fields; those not given are empty."""
    found = []
    for seq, (kind, step, fields) in enumerate(events):
        empty = {
            "str": "x",
            "int": 0,
            "bool": False,
            "float": 0,
            "list": [],
            "dict": {},
            "any": None,
        }
        known = {
            name: None if field.optional else empty[field.type]
            for name, field in EVENTS[kind].fields.items()
        }
        found.append({"kind": kind, "seq": seq, "step": step, **known, **fields})
    return found


def scheduled(
    step: int,
    req: str,
    computed: int,
    scheduled: int,
    known: int,
    drafts: int = 0,
    table: tuple[int, ...] = (1,),
) -> tuple[str, int, dict[str, Any]]:
    return (
        "req.scheduled",
        step,
        {
            "req": req,
            "computed": computed,
            "scheduled": scheduled,
            "known": known,
            "drafts": drafts,
            "table": list(table),
        },
    )


def pieces(cell: list[Any]) -> dict[str, int]:
    return {name: count for name, count in zip(PIECES, cell[3:], strict=False) if count}


def test_a_step_of_hits_loads_and_computing() -> None:
    story = build(
        trace(
            ("alloc", 1, {"req": "a", "local": 4, "external": 8, "blocks": [1, 2, 3]}),
            scheduled(1, "a", 12, 5, 20, table=(1, 2, 3, 4)),
        ),
        {},
    )
    (cell,) = story["cells"]
    assert story["requests"] == ["a"] and cell[:2] == [0, 1]
    assert pieces(cell) == {"local": 4, "loaded": 8, "computed": 5}
    assert cell[-3:] == [12, 20, [1, 2, 3, 4]]
    assert story["spans"] == [[0, 1, 1, "load", 0]]


def test_a_placeholder_is_a_position_past_the_known_tokens() -> None:
    story = build(trace(scheduled(1, "a", 8, 2, 9)), {})
    assert pieces(story["cells"][0]) == {"computed": 1, "placeholder": 1}


def test_what_became_of_drafts() -> None:
    events = trace(
        scheduled(1, "a", 8, 4, 9, drafts=3),
        ("kv.computed", 2, {"req": "a", "start": 8, "end": 12, "accepted": 1, "rejected": 2}),
    )
    story = build(events, {})
    assert pieces(story["cells"][0]) == {"computed": 1, "accepted": 1, "rejected": 2}
    unknown = build(events[:1], {})
    assert pieces(unknown["cells"][0]) == {"computed": 1, "draft": 3}


def test_an_asynchronous_load_lasts_until_it_is_due() -> None:
    alloc = ("alloc", 1, {"req": "a", "external": 8, "is_async": True})
    assert build(trace(alloc, ("load.due", 4, {"req": "a"})), {})["spans"] == [[0, 1, 4, "load", 0]]
    assert build(trace(alloc, ("step.scheduled", 6, {})), {})["spans"] == [[0, 1, 6, "load", 0]], (
        "one that never ends lasts to the end"
    )


def test_wrong_bytes_point_to_the_step_that_computed_them() -> None:
    wrong = {"req": "b", "pos": 3, "count": 2, "found": "other_request"}
    wrong |= {"origin": "token 3 of a", "origin_req": "a", "origin_pos": 3}
    events = trace(
        scheduled(1, "a", 0, 5, 5),
        ("kv.computed", 1, {"req": "a", "start": 0, "end": 5}),
        ("kv.wrong", 3, wrong),
        ("kv.wrong", 3, wrong | {"layer": 1}),
    )
    assert build(events, {})["wrong"] == [
        [1, 3, 2, 3, 2, "KV of another request", "token 3 of a", 0, 1, ""]
    ], "the same byte of several layers is one entry"
    events[2]["origin_pos"] = None  # it was taken before request a had computed the token
    assert build(events[:3], {})["wrong"][0][7:9] == [0, 1]
    events[2]["origin_req"] = None
    assert build(events[:3], {})["wrong"][0][7:9] == [-1, -1]


def test_wrong_bytes_have_their_back_story() -> None:
    wrong = {"req": "c", "pos": 2, "found": "other_request", "origin": "token 2 of b"}
    wrong |= {"origin_req": "b", "origin_pos": 2}
    events = trace(
        ("run.start", 0, {"block_size": 4, "groups": 1, "context_ranks": 1}),
        scheduled(1, "a", 0, 4, 4, table=(7,)),
        ("req.state", 2, {"req": "a", "to": "PREEMPTED"}),
        scheduled(3, "b", 0, 4, 4, table=(7,)),
        ("kv.wrong", 4, wrong),
    )
    before = build(events, {})["wrong"][0][-1]
    assert before.startswith("block 7 was block 0 of request a up to its preemption in step 2")
    events[2]["to"] = "RUNNING"
    assert build(events, {})["wrong"][0][-1] == "", "a kept its block"


def test_hooks_with_what_they_raised() -> None:
    called = ("hook.called", 2, {"hook": "get_finished", "half": "worker"})
    nested = ("hook.called", 2, {"hook": "inner", "half": "worker", "depth": 1})
    story = build(
        trace(
            called,
            nested,
            (
                "hook.returned",
                2,
                {
                    "hook": "get_finished",
                    "called_seq": 0,
                    "error": "KeyError",
                    "error_text": "no a",
                },
            ),
        ),
        {},
    )
    assert story["names"] == ["get_finished"]
    assert story["hooks"] == [[2, 1, 0, 0, "no a"]]


def test_two_engines_have_lanes_of_their_own() -> None:
    events = trace(scheduled(1, "a", 0, 4, 4), scheduled(2, "a", 0, 4, 4))
    events[0]["on"], events[1]["on"] = "p", "d"
    assert build(events, {})["requests"] == ["p: a", "d: a"]


@pytest.mark.parametrize("kind", sorted(EVENTS))
def test_every_event_can_be_told(kind: str) -> None:
    fields = {"req": "a"} if "req" in EVENTS[kind].fields else {}
    build(trace((kind, 1, fields)), {"some.rule": 0})


def test_a_long_run_keeps_what_is_around_the_failure() -> None:
    events = trace(*[("step.scheduled", step, {}) for step in range(LONGEST + 500)])
    story = build(events, {"some.rule": 12_400})
    assert story["left_out"] == 500 and story["steps"] >= 12_400
    assert build(events[:100], {})["left_out"] == 0


def test_packed_and_unpacked() -> None:
    story = build(trace(scheduled(1, "ä", 0, 4, 4)), {})
    assert unpack(pack(story)) == story
    for text in ("", "no story", "eJw="):
        with pytest.raises(ValueError, match="not a story"):
            unpack(text)


def test_a_run_without_failure_has_none() -> None:
    row = Row("some.rule", "a.case", "vllm", "sync", "v1", 1, 4, Verdict.PASS)
    assert story_of(trace(scheduled(1, "a", 0, 4, 4)), [row]) is None
    row.verdict, row.event = Verdict.FAIL, 0
    assert unpack(story_of(trace(scheduled(1, "a", 0, 4, 4)), [row]) or "")["marks"] == {
        "some.rule": 0
    }


def test_of_a_long_run_there_is_as_much_as_fits_and_no_mark_outside_of_it() -> None:
    events = trace(*[("step.scheduled", number, {}) for number in range(LONGEST + 8000)])
    early = build(events, {"a": 500, "b": LONGEST + 7000})
    assert early["left_out"] == 8000 and early["first"] == 0 and early["marks"] == {"a": 500}
    late = build(events, {"b": LONGEST + 7000})
    assert late["left_out"] == 8000 and late["marks"] == {"b": LONGEST + 7000}


def test_what_is_no_text_can_be_packed() -> None:
    assert unpack(pack({"lines": ["caf\udce9"]})) == {"lines": ["caf\udce9"]}
