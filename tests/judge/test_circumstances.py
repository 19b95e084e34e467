# SPDX-License-Identifier: Apache-2.0
"""Tests that usual causes are dropped which the run of a failure rules out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvconform.contract.loader import load_spec
from kvconform.judge.circumstances import WORDS, absent, possible

WRONG = "Copies on a thread; keeps a block table over a preemption; or forgets Drafts."
KINDS = ("shared", "over_computed", "null_block", "unallocated", "other_request")
WRITTEN: dict[str, Any] = {"kind": "kv.changed", **{kind: [] for kind in KINDS}}
EVENTS: dict[str, dict[str, Any]] = {
    "preemption": {"kind": "req.state", "to": "PREEMPTED"},
    "drafts": {"kind": "req.scheduled", "drafts": 2, "placeholders": 0},
    "placeholders": {"kind": "req.scheduled", "drafts": 0, "placeholders": 1},
    "reset": {"kind": "cache.reset", "connector": False},
    "reset of the connector": {"kind": "cache.reset", "connector": True},
    "abort": {"kind": "req.state", "to": "FINISHED_ABORTED"},
    "write over a hit": {**WRITTEN, "shared": [4]},
    "write to a lost block": {**WRITTEN, "unallocated": [9]},
    "write to block 0": {**WRITTEN, "null_block": [1]},
    "local hit": {"kind": "lookup", "local": 4, "tokens": 0},
    "kernel blocks": {"kind": "kv.registered", "kernel_blocks": 3},
    "hit": {"kind": "lookup", "local": 0, "tokens": 4},
    "release before a load": {"kind": "pair.request", "gone": True},
    "several ranks": {"kind": "run.changed", "ranks": 2},
    "kill": {"kind": "engine.lifecycle", "op": "killed"},
    "pooling": {"kind": "run.start", "pooling": True},
}


@pytest.mark.parametrize("name", WORDS)
def test_a_circumstance_is_known_from_then_on(name: str) -> None:
    quiet = [
        {"kind": "req.state", "to": "RUNNING", "seq": 0},
        {"kind": "req.scheduled", "drafts": 0, "placeholders": 0, "seq": 1},
        {"kind": "engine.lifecycle", "op": "start", "seq": 2},
        {"kind": "kv.registered", "kernel_blocks": 1, "seq": 3},
        {**WRITTEN, "seq": 4},
    ]
    quiet = [{**event, "step": 1} for event in quiet]
    trace = [*quiet, {**EVENTS[name], "seq": 5, "step": 2}]
    assert set(absent(trace, trace[4])) == set(WORDS)
    both = {"reset", name} if name == "reset of the connector" else {name}
    assert set(absent(trace, trace[5])) == set(WORDS) - both
    trace[5]["step"] = 1
    assert name not in absent(trace, trace[4]), "what is recorded later in the step counts"


def test_an_engine_of_several_may_have_more_ranks() -> None:
    trace = [
        {"kind": "run.engines", "own": {"p": {}, "d": {"ranks": 2}}, "seq": 0, "step": 0},
        {"kind": "run.start", "ranks": 1, "seq": 1, "step": 0},
    ]
    assert "several ranks" not in absent(trace, trace[1])
    trace[0]["own"] = {"p": {}, "d": {"block_size": 8}}
    assert "several ranks" in absent(trace, trace[1])


def test_a_local_hit_matters_to_the_request_that_has_it() -> None:
    hit = {"kind": "lookup", "req": "a", "local": 4, "tokens": 0, "seq": 0, "step": 1}
    for req, ruled_out in (("a", False), ("b", True), (None, False)):
        failure = {"kind": "load.due", "req": req, "seq": 1, "step": 2}
        assert ("local hit" in absent([hit, failure], failure)) is ruled_out


def test_placeholders_come_up_in_a_step_that_a_hook_cuts_short() -> None:
    trace = [
        {"kind": "hook.returned", "hook": "build_connector_meta", "seq": 0, "step": 2},
        {"kind": "req.interrupted", "placeholders": 1, "seq": 1, "step": 2},
    ]
    assert "placeholders" not in absent(trace, trace[0])


def test_a_cause_that_shows_in_another_hook_is_dropped() -> None:
    text = "Asserts in one_hook, other_hook or third_hook; or waits for a lock."
    assert possible(text, (), "third_hook") == text
    assert possible(text, (), "other_hook") == text
    assert possible(text, (), "fourth_hook") == "Waits for a lock."
    assert possible(text, ()) == text


def test_causes_that_need_what_is_absent_are_dropped() -> None:
    assert possible(WRONG, ("preemption",)) == "Forgets Drafts; or copies on a thread."
    assert possible(WRONG, ("preemption", "drafts")) == "Copies on a thread."
    assert possible("Keeps a table over a preemption.", ("preemption",)) == ""
    assert possible("", ("preemption",)) == ""


def test_causes_that_need_what_came_up_are_first() -> None:
    assert possible(WRONG, ()) == (
        "Keeps a block table over a preemption; forgets Drafts; or copies on a thread."
    )


def test_only_the_beginning_of_a_word_names_a_circumstance() -> None:
    text = "Reads metadata in handle_preemptions."
    assert possible(text, ("preemption",)) == text


@pytest.mark.parametrize(
    ("requirement", "hook", "came_up", "expected"),
    [
        ("load.only-grant", None, "write over a hit", r"Copies .* over the local hit\."),
        ("load.only-grant", None, "write to block 0", r"Takes the null block .*"),
        ("load.only-grant", None, "kernel blocks", r"Takes block ids .* kernel blocks\."),
        ("lookup.last-token", None, "", r"Claims .* last token\."),
        ("lookup.last-token", None, "local hit", r"Returns the length .*; or claims .*"),
        ("load.only-grant", None, "abort, write to a lost block", r"Lets [^;]* aborted [^;]*"),
        ("load.only-grant", None, "abort, preemption", ""),
        ("load.only-grant", None, "drafts", ""),
        (
            "hook.no-raise",
            "build_connector_meta",
            "placeholders",
            r"Slices .*; goes on .*; or indexes .*",
        ),
        (
            "hook.no-raise",
            "build_connector_meta",
            "drafts",
            r"Slices [^;]*; takes [^;]*; or goes on [^;]*",
        ),
        ("hook.no-raise", "handle_preemptions", "drafts", r"Reads metadata [^;]*"),
        ("hook.no-raise", "request_finished", "drafts", r"Takes it [^;]*; or slices [^;]*"),
        ("hook.no-raise", "save_kv_layer", "placeholders", ""),
    ],
)
def test_the_causes_that_a_failure_leaves_possible(
    requirement: str, hook: str | None, came_up: str, expected: str
) -> None:
    wrong = load_spec().requirements[requirement].wrong or ""
    text = possible(wrong, [name for name in WORDS if name not in came_up.split(", ")], hook)
    assert re.fullmatch(expected, text), text


def test_every_word_rules_something_out() -> None:
    texts = " ".join((each.wrong or "").lower() for each in load_spec().requirements.values())
    assert [word for words in WORDS.values() for word in words if word not in texts] == []


def test_a_cause_that_names_an_error_is_dropped_for_other_errors() -> None:
    text = "Goes too far (an IndexError) in one_hook; or forgets a request (a KeyError)."
    assert possible(text, (), "one_hook", ("hook.returned", "IndexError")) == (
        "Goes too far (an IndexError) in one_hook."
    )
    assert possible(text, (), "one_hook", ("hook.returned", "ValueError")) == ""
    assert possible("Waits for a lock.", (), "one_hook", ("KeyError",)) == "Waits for a lock."
    assert possible(text, (), "one_hook") == text
