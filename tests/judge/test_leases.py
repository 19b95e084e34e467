# SPDX-License-Identifier: Apache-2.0
"""Tests of the sentence about leases on held blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvconform.config.target import Target
from kvconform.contract.case import Case, Variant
from kvconform.contract.loader import load_spec
from kvconform.judge.leases import lease_of
from kvconform.judge.narrate import narrate
from kvconform.judge.records import Row, Verdict
from kvconform.run.case import run_and_judge
from verdict_rig import AXES

Event = dict[str, Any]
HOLD: Event = {"kind": "hold", "req": "a", "generation": 0, "direction": "send", "cause": "finish"}
RELEASE: Event = {**HOLD, "kind": "release"}
STALL: Event = {
    "kind": "engine.stall",
    "steps": 60,
    "limit": 2.0,
    "threads": 0,
    "advanced": 0.0,
    "waiting_on": ["b: WAITING"],
}
LEAPT: Event = {**STALL, "advanced": 60.0}
END: Event = {
    "kind": "run.end",
    "quiesced": False,
    "crashed": False,
    "unfinished": [],
    "free_blocks": 1,
    "free_blocks_at_start": 1,
    "request_objects_alive": [],
    "engine_requests": [],
    "threads": 0,
}


def trace(*events: Event) -> list[Event]:
    return [{"step": 0, **event, "seq": seq} for seq, event in enumerate(events)]


def test_it_says_how_far_the_clock_went() -> None:
    run = trace(HOLD, LEAPT, END)
    said = lease_of(run, run[0])
    assert said is not None
    assert "the clock was set forward by 60 s" in said
    assert "Leases and time" in said
    assert lease_of(run, run[-1]) == said


def test_it_says_which_setting_gives_a_lease_more_time() -> None:
    run = trace(HOLD, STALL, END)
    said = lease_of(run, run[0])
    assert said is not None
    assert "it had 2 s of real time" in said and "raise stall_seconds" in said
    assert lease_of(run, run[-1]) == said


@pytest.mark.parametrize(
    "events",
    [
        [STALL, END],  # nothing is held
        [HOLD, RELEASE, LEAPT, END],
        [HOLD, {**END, "quiesced": True}],
        [{**HOLD, "direction": "recv"}, LEAPT, END],  # a load has no lease
        [HOLD, END],  # no stall: the run ended before
    ],
)
def test_without_a_lease_it_says_nothing(events: list[Event]) -> None:
    run = trace(*events)
    assert lease_of(run, run[-1]) is None


def test_a_run_that_came_to_rest_holds_nothing() -> None:
    """A stall may come before: the next part of the run goes on, and releases what was held."""
    run = trace(HOLD, LEAPT, {**END, "quiesced": True})
    assert lease_of(run, run[-1]) is None
    assert lease_of(run, run[0]) is not None


@pytest.mark.parametrize(
    "other", [{"on": "d"}, {"req": "b"}, {"generation": 1}], ids=lambda other: next(iter(other))
)
def test_only_its_own_release_ends_a_hold(other: Event) -> None:
    run = trace({**HOLD, "on": "p"}, {**RELEASE, "on": "p", **other}, LEAPT, END)
    assert lease_of(run, run[-1]) is not None
    run = trace({**HOLD, "on": "p"}, {**RELEASE, "on": "p"}, LEAPT, END)
    assert lease_of(run, run[-1]) is None


def test_a_stall_before_the_hold_says_nothing_about_it() -> None:
    run = trace(LEAPT, HOLD, END)
    assert lease_of(run, run[1]) is None


def test_a_load_has_none() -> None:
    run = trace({**HOLD, "direction": "recv"}, LEAPT, END)
    assert lease_of(run, run[0]) is None


@pytest.mark.parametrize(("name", "event"), [("send.released", 0), ("run.quiesces", 2)])
def test_a_failure_says_it(name: str, event: int) -> None:
    run = trace(HOLD, LEAPT, END)
    row = Row(requirement=name, case="x", **AXES, verdict=Verdict.FAIL, event=event, message="c")
    narrate([row], run, load_spec().requirements)
    assert row.message is not None and "set forward by 60 s" in row.message


def test_an_offer_that_nobody_takes_names_the_lease(tmp_path: Path) -> None:
    """A lease of 0 never expires, and workloads of exploration may not take what is offered."""
    steps = [
        {"add": {"req": "p1", "prompt": 13, "max_tokens": 1, "hand_over": True}},
        {"run": {}},
    ]
    data = {"id": "x.offer", "area": "x", "text": "An offer.", "steps": steps}
    config = {"engines": {"p": "kv_producer", "d": "kv_consumer"}}
    case = Case.model_validate({**data, "config": config, "engines": ["reference"]}, strict=False)
    target = Target(
        "kvconform.refimpl.variants.peer:Peer",
        {"lease": 0},
        capabilities={"transfer": True, "roles": ["kv_producer", "kv_consumer"]},
        stall_seconds=0.1,
    )
    variant = Variant(case, "reference", "sync", "v1", 1, case.config.block_size)
    report = run_and_judge(variant, target, load_spec(), seed=0, tmp=tmp_path)
    said = {row.requirement: row.message for row in report.rows if row.verdict == "FAIL"}
    assert "set forward by 1200 s" in (said["send.released"] or "")
