# SPDX-License-Identifier: Apache-2.0
"""Tests of the sentence about the ranks that reported a transfer."""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.contract.loader import load_spec
from kvconform.judge.narrate import narrate
from kvconform.judge.ranks import reports_of
from kvconform.judge.records import Row, Verdict
from verdict_rig import AXES

Event = dict[str, Any]
COUNTED: Event = {"kind": "hook.returned", "hook": "get_finished_count", "step": 0}


def reported(rank: int, **more: Any) -> Event:
    return {
        "kind": "transfer.reported",
        "step": 1,
        "req": "c",
        "generation": 0,
        "transfer": "c#0.1",
        "direction": "recv",
        "held": True,
        "rank": rank,
        **more,
    }


def trace(*events: Event, ranks: int = 2) -> list[Event]:
    start = {"kind": "run.start", "step": 0, "ranks": ranks}
    return [{**event, "seq": seq} for seq, event in enumerate([start, *events])]


def said(*events: Event, ranks: int = 2) -> str:
    run = trace(*events, ranks=ranks)
    return reports_of(run, next(e for e in run if e["kind"] == "transfer.reported"))


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        (
            [{**COUNTED, "value": "2"}, reported(1)],
            "1 of 2 reports came, from rank 1 (get_finished_count returned 2)",
        ),
        (
            [{**COUNTED, "value": "None"}, reported(0), reported(1)],
            "2 of 3 reports came, from ranks 0, 1"
            " (get_finished_count returned None: one from each rank)",
        ),
        (
            [reported(0)],
            "1 of 3 reports came, from rank 0"
            " (get_finished_count was not asked: one from each rank)",
        ),
    ],
)
def test_the_reports_are_counted(events: list[Event], sentence: str) -> None:
    assert said(*events, ranks=3) == sentence


def test_only_those_of_this_transfer_count() -> None:
    others = [
        reported(1, direction="send"),
        reported(1, req="d"),
        reported(1, generation=1),
        reported(1, on="p"),
    ]
    assert said(reported(0), *others).startswith("1 of 2 reports came, from rank 0 ")


def test_another_engines_count_is_not_this_ones() -> None:
    events = [
        {**COUNTED, "value": "4", "on": "p"},
        {"kind": "ranks.joined", "step": 1, "expected": 4, "on": "p"},
        {**COUNTED, "value": "3", "on": "d"},
        reported(0, on="d"),
    ]
    assert said(*events) == "1 of 3 reports came, from rank 0 (get_finished_count returned 3)"


def test_a_failure_of_all_report_names_the_count() -> None:
    run = trace({**COUNTED, "value": "2"}, reported(0))
    row = Row(
        requirement="ranks.all-report",
        case="x",
        **AXES,
        verdict=Verdict.FAIL,
        event=2,
        message="c",
    )
    narrate([row], run, load_spec().requirements)
    assert row.message is not None
    assert "; 1 of 2 reports came, from rank 0 (get_finished_count returned 2); c" in row.message
