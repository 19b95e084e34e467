# SPDX-License-Identifier: Apache-2.0
"""Tests of the sentence about leases on held blocks."""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.contract.loader import load_spec
from kvconform.judge.leases import lease_of
from kvconform.judge.narrate import narrate
from kvconform.judge.records import Row, Verdict
from verdict_rig import AXES

Event = dict[str, Any]
HOLD: Event = {"kind": "hold", "req": "a", "generation": 0, "direction": "send", "cause": "finish"}
RELEASE: Event = {**HOLD, "kind": "release"}
LEAP: Event = {"kind": "clock.advanced", "seconds": 30.0, "why": "stall"}
STALL: Event = {
    "kind": "engine.stall",
    "steps": 60,
    "limit": 2.0,
    "threads": 0,
    "waiting_on": ["b: WAITING"],
}
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
    run = trace(LEAP, HOLD, LEAP, {**LEAP, "why": "idle"}, LEAP, STALL, END)
    said = lease_of(run, run[1])
    assert said is not None
    assert "the clock was set forward by 60 s" in said
    assert "Leases and time" in said
    assert lease_of(run, run[-1]) == said


def test_it_says_which_setting_gives_a_lease_more_time() -> None:
    run = trace(HOLD, STALL, END)
    said = lease_of(run, run[0])
    assert said is not None
    assert "the lease had 2 s of real time" in said and "raise stall_seconds" in said
    assert lease_of(run, run[-1]) == said


@pytest.mark.parametrize(
    "events",
    [
        [STALL, END],  # nothing is held
        [HOLD, RELEASE, LEAP, STALL, END],
        [HOLD, {**END, "quiesced": True}],
        [{**HOLD, "direction": "recv"}, LEAP, STALL, END],  # a load has no lease
        [HOLD, END],  # no stall: the run ended before
    ],
)
def test_without_a_lease_it_says_nothing(events: list[Event]) -> None:
    run = trace(*events)
    assert lease_of(run, run[-1]) is None


def test_a_load_has_none() -> None:
    run = trace({**HOLD, "direction": "recv"}, LEAP, STALL, END)
    assert lease_of(run, run[0]) is None


@pytest.mark.parametrize(("name", "event"), [("send.released", 0), ("run.quiesces", 3)])
def test_a_failure_says_it(name: str, event: int) -> None:
    run = trace(HOLD, LEAP, STALL, END)
    row = Row(requirement=name, case="x", **AXES, verdict=Verdict.FAIL, event=event, message="c")
    narrate([row], run, load_spec().requirements)
    assert row.message is not None and "set forward by 30 s" in row.message
