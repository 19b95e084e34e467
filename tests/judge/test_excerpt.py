# SPDX-License-Identifier: Apache-2.0
"""Tests of the excerpt of a failure, in which other requests than the failing one matter.

At the end of a run it shows the lives of the requests that were left over, or whose blocks were; of
KV that did not come back, the steps that computed it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.judge.backtrace import EXCERPT, LEAST, excerpt
from kvconform.refimpl.connector import Finish, ReferenceConnector
from kvconform.report.timeline import render
from kvconform.run.case import run_and_judge

Event = dict[str, Any]
SPEC = load_spec()
LOOKUPS = "kvconform.refimpl.defects.unlisted:KeepsLookups"


class PinsFirst(ReferenceConnector):
    """Keeps the blocks of the first request that finishes."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        if (pool := self.__dict__.pop("_pool", None)) is not None:
            pool.touch([pool.blocks[block] for block in block_ids])
        return super().request_finished(request, block_ids)


def timeline(case: str, connector: str, tmp: Path, engine: str) -> list[str]:
    """The excerpt of the failure of end.baseline, as it is printed."""
    variant = SPEC.cases[case].variants([engine], ["sync"])[0]
    report = run_and_judge(
        variant, Target(connector, {"store": "memory:{tmp}"}), SPEC, seed=0, tmp=tmp
    )
    assert report.harness_error is None
    return render(report.excerpts["end.baseline"])


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_a_request_that_is_kept_alive_is_shown(tmp_path: Path, engine: str) -> None:
    lines = timeline("lifecycle.lookup-then-abort", LOOKUPS, tmp_path, engine)
    lives = [line.split()[1:3] for line in lines]
    assert ["lookup", "b"] in lives and ["state", "b"] in lives and ["finished", "b"] in lives
    assert not [line for line in lines if " c " in line or "req=c" in line], (
        "the request that ran last has nothing to do with it"
    )
    assert "request objects still alive: b" in lines[-2]


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_the_request_whose_blocks_are_not_free_is_shown(tmp_path: Path, engine: str) -> None:
    lines = timeline("lifecycle.lookup-then-abort", f"{__name__}:PinsFirst", tmp_path, engine)
    lives = [line.split()[1:3] for line in lines]
    assert ["alloc", "a"] in lives and ["finished", "a"] in lives and ["state", "b"] not in lives
    assert "blocks not free" in lines[-2]


def trace(
    *events: Event, alive: tuple[str, ...] = (), known: tuple[str, ...] = (), free: int = 5
) -> list[Event]:
    """A run of 40 steps after these events. 5 blocks were free at its start."""
    steps = [{"kind": "step.scheduled"}, {"kind": "req.scheduled", "req": "z"}] * 40
    end = {"kind": "run.end", "engine_requests": list(known), "request_objects_alive": list(alive)}
    end |= {"free_blocks": free, "free_blocks_at_start": 5}
    return [{**event, "seq": number} for number, event in enumerate([*events, *steps, end])]


def shown(run: list[Event]) -> list[str]:
    """The requests of the excerpt at the end of a run, in order."""
    return [event["req"] for event in excerpt(run, run[-1]["seq"], None) if "req" in event]


def life(req: str, lookups: int = 1) -> list[Event]:
    return [
        *({"kind": "lookup", "req": req, "local": number} for number in range(lookups)),
        {"kind": "req.finished", "req": req, "tables": []},
    ]


def block(op: str, number: int, ref: int, owner: str | None = None) -> Event:
    return {"kind": "block", "op": op, "id": number, "ref": ref, "owner": owner}


def finished(req: str, *table: int) -> Event:
    return {"kind": "req.finished", "req": req, "tables": [[4, 0, list(table), 0]]}


def test_requests_of_the_engine_and_those_kept_alive() -> None:
    run = trace(*life("a"), *life("b"), *life("c"), alive=("a", "c"), known=("c",))
    assert shown(run) == ["a", "a", "c", "c"]
    assert len(excerpt(run, run[-1]["seq"], None)) == 4 + EXCERPT // 2


def test_where_nothing_is_left_over_all_requests_are_shown() -> None:
    run = trace(*life("a"))
    assert (
        shown(run) == ["z"] * (EXCERPT // 2) and len(excerpt(run, run[-1]["seq"], None)) == EXCERPT
    )


def test_of_a_long_life_the_beginning_and_the_end_are_shown() -> None:
    run = trace(*life("a", 100), alive=("a",))
    found = [event for event in excerpt(run, run[-1]["seq"], None) if "req" in event]
    assert len(found) == EXCERPT and found[0]["local"] == 0 and found[-1]["kind"] == "req.finished"


def test_of_many_requests_the_first_ones_are_shown() -> None:
    names = [f"r{number:03}" for number in range(50)]
    run = trace(*(event for name in names for event in life(name, 4)), alive=tuple(names))
    assert sorted(set(shown(run))) == names[: EXCERPT // LEAST] and len(shown(run)) == EXCERPT


@pytest.mark.parametrize(
    ("events", "who"),
    [
        ([block("alloc", 1, 1, "a"), finished("a", 1), block("free", 1, 1)], ["a"]),
        (
            [
                block("alloc", 1, 1, "a"),
                finished("a", 1),
                block("free", 1, 1),
                finished("b", 1),
                block("free", 1, 1),
            ],
            ["a", "b"],
        ),
        # a local hit
        (
            [
                block("alloc", 1, 1, "a"),
                finished("a", 1),
                block("free", 1, 0),
                finished("b", 1),
                block("free", 1, 1),
            ],
            ["b"],
        ),
        # the null block has no owner
        ([block("alloc", 1, 1, "a"), finished("a", 0, 1), block("free", 1, 0)], []),
        ([block("alloc", 1, 1, "a"), block("free", 1, 0), block("alloc", 1, 1, "b")], ["b"]),
        ([block("alloc", 1, 1, "a"), {"kind": "engine.lifecycle", "op": "restart"}], []),
        ([block("alloc", 1, 1, "nobody")], []),
        ([{**block("alloc", 1, 1, "a"), "on": "other"}], []),  # of the other engine
    ],
)
def test_who_had_the_blocks(events: list[Event], who: list[str]) -> None:
    before = [*life("a"), *life("b")]
    assert list(dict.fromkeys(shown(trace(*before, *events, free=4)))) == (who or ["z"])


@pytest.mark.parametrize(
    ("event", "noise"),
    [
        ({"kind": "case.expectation", "holds": True}, True),
        ({"kind": "case.expectation", "holds": False}, False),
        ({"kind": "profile.expectation", "of": "a", "reloadable": 8, "promised": 8}, True),
        ({"kind": "profile.expectation", "of": "a", "reloadable": 4, "promised": 8}, False),
        ({"kind": "cache.reset", "phase": "asked", "returned": None}, True),
        ({"kind": "cache.reset", "phase": "called", "returned": None}, True),
        ({"kind": "cache.reset", "phase": "returned", "returned": True}, True),
        ({"kind": "cache.reset", "phase": "returned", "returned": False}, False),
        ({"kind": "cache.reset", "phase": "done", "returned": True}, False),
        ({"kind": "engine.lifecycle", "op": "start", "error": None}, True),
        ({"kind": "engine.lifecycle", "op": "restart", "error": None}, False),
        ({"kind": "req.state", "req": "a", "from": "WAITING", "to": "RUNNING"}, True),
        ({"kind": "req.state", "req": "a", "from": "PREEMPTED", "to": "RUNNING"}, False),
        ({"kind": "step.scheduled", "new": ["b"]}, True),
        ({"kind": "step.scheduled", "cached": ["b", "a"]}, False),
    ],
)
def test_what_says_nothing_takes_no_place(event: Event, noise: bool) -> None:
    events = [event, {"kind": "lookup", "req": "a", "step": 1}]
    run = [{"step": 0, **each, "seq": number} for number, each in enumerate(events)]
    assert (run[0] not in excerpt(run, 1, "a")) is noise
    assert run[0] in excerpt(run, 0, "a"), "unless it is the violation itself"


def test_only_the_layer_of_the_violation_and_its_step_are_shown() -> None:
    wrong = {"kind": "kv.wrong", "req": "a", "origin_req": None, "origin_pos": None, "step": 4}
    events = [
        {**wrong, "layer": 0, "pos": 0},
        {**wrong, "layer": 1, "pos": 0},
        {**wrong, "layer": 0, "pos": 4},
        {**wrong, "layer": 0, "pos": 8},
        {"kind": "req.finished", "req": "a", "step": 4},
        {"kind": "req.finished", "req": "a", "step": 5},
    ]
    run = [{**each, "seq": number} for number, each in enumerate(events)]
    assert [each["seq"] for each in excerpt(run, 2, "a")] == [0, 2, 4]


class RaisesInStepTwo(ReferenceConnector):
    """Raises when it builds the second metadata."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.__dict__["built"] = self.__dict__.get("built", 0) + 1
        if self.__dict__["built"] == 2:
            raise KeyError("lost")
        return super().build_connector_meta(scheduler_output)


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_the_step_in_which_a_hook_raises_is_shown_with_its_counters(
    tmp_path: Path, engine: str
) -> None:
    variant = SPEC.cases["chunked.boundaries"].variants([engine], ["sync"])[0]
    target = Target(f"{__name__}:RaisesInStepTwo", {"store": "memory:{tmp}"})
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path)
    assert report.harness_error is None
    row = next(row for row in report.rows if row.requirement == "hook.no-raise")
    assert (row.verdict, row.headline) == ("FAIL", "build_connector_meta raised KeyError")
    lines = render(report.excerpts["hook.no-raise"], row.event)
    mark = next(number for number, line in enumerate(lines) if line.startswith(">"))
    assert "RAISED" in lines[mark]
    assert " as build_connector_meta saw it: computed=" in lines[mark + 1]
    assert " scheduled=" in lines[mark + 1] and " known=" in lines[mark + 1]


def test_poison_that_was_saved_shows_the_step_that_could_save_it() -> None:
    """A prefill in chunks of 4: the second block was stored after the first chunk."""
    chunks = [(0, [1, 2]), (4, [1, 2]), (8, [1, 2, 3])]
    run: list[Event] = [{"kind": "run.start", "block_size": 4}]
    run += [
        {"kind": "req.scheduled", "req": "a", "listed_as": "new" if not at else "cached"}
        | {"computed": at, "scheduled": 4, "table": table}
        for at, table in chunks
    ]
    run += [{"kind": "step.scheduled", "new": ["b"]}] * (EXCERPT + 1)
    wrong = {"kind": "kv.wrong", "req": "b", "found": "never_computed", "pos": 6, "layer": 0}
    run.append(wrong | {"origin_req": "a", "origin_pos": None})
    run = [{**event, "seq": number, "step": number} for number, event in enumerate(run)]
    sources = [e for e in excerpt(run, run[-1]["seq"], "b") if e.get("req") == "a"]
    assert [e["computed"] for e in sources] == [0], "later, the position was computed"


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_the_steps_that_computed_what_did_not_come_back(tmp_path: Path, engine: str) -> None:
    target = Target(
        "kvconform.refimpl.defects.chunked:StopsBeforeTheLastToken",
        {"store": "memory:{tmp}", "save_decode": False},
        capabilities={"saves": "prompt"},
    )
    variant = SPEC.cases["chunked.boundaries"].variants([engine], ["sync"])[0]
    report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path)
    [row] = [row for row in report.rows if row.requirement == "save.completeness"]
    assert "28 did; b computed the others in step" in row.message
    shown = report.excerpts["save.completeness"]
    computed = [e for e in shown if e["kind"] == "req.scheduled" and e["req"] == "b"]
    ends = [(e["computed"], e["computed"] + e["scheduled"]) for e in computed]
    assert ends and all(start < 32 and end > 28 for start, end in ends)


def test_an_event_of_several_requests_shows_what_led_to_each() -> None:
    """As a change of memory that two requests share."""
    trace: list[Event] = [
        {"kind": "alloc", "seq": 0, "step": 1, "req": "a"},
        {"kind": "alloc", "seq": 1, "step": 1, "req": "b"},
        {"kind": "alloc", "seq": 2, "step": 2, "req": "c"},
        {"kind": "kv.changed", "seq": 3, "step": 2, "req": ["a", "b"]},
    ]
    assert [e["seq"] for e in excerpt(trace, 3, "a, b")] == [0, 1, 3]
    assert [e["seq"] for e in excerpt(trace, 3, None)] == [0, 1, 3]
