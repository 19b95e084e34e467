# SPDX-License-Identifier: Apache-2.0
"""Tests that usual causes are dropped which the run of a failure rules out."""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.contract.loader import load_spec
from kvconform.judge.circumstances import WORDS, absent, possible

WRONG = "Copies on a thread; keeps a block table over a preemption; or forgets Drafts."
EVENTS: dict[str, dict[str, Any]] = {
    "preemption": {"kind": "req.state", "to": "PREEMPTED"},
    "drafts": {"kind": "req.scheduled", "drafts": 2, "placeholders": 0},
    "placeholders": {"kind": "req.scheduled", "drafts": 0, "placeholders": 1},
    "reset": {"kind": "cache.reset"},
    "abort": {"kind": "req.state", "to": "FINISHED_ABORTED"},
}


@pytest.mark.parametrize("name", WORDS)
def test_a_circumstance_is_known_from_then_on(name: str) -> None:
    quiet = [
        {"kind": "req.state", "to": "RUNNING", "seq": 0},
        {"kind": "req.scheduled", "drafts": 0, "placeholders": 0, "seq": 1},
        {"kind": "engine.lifecycle", "op": "start", "seq": 2},
    ]
    trace = [*quiet, {**EVENTS[name], "seq": 3}]
    assert set(absent(trace, 2)) == set(WORDS)
    assert set(absent(trace, 3)) == set(WORDS) - {name}


def test_causes_that_need_what_is_absent_are_dropped() -> None:
    assert possible(WRONG, ()) == WRONG
    assert possible(WRONG, ("preemption",)) == "Copies on a thread; or forgets Drafts."
    assert possible(WRONG, ("preemption", "drafts")) == "Copies on a thread."
    assert possible("Keeps a table over a preemption.", ("preemption",)) == ""
    assert possible("", ("preemption",)) == ""


def test_every_word_rules_something_out() -> None:
    texts = " ".join((each.wrong or "").lower() for each in load_spec().requirements.values())
    assert [word for words in WORDS.values() for word in words if word not in texts] == []
