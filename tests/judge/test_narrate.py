# SPDX-License-Identifier: Apache-2.0
"""Tests of the facts that a failed verdict gets: message, check, cause, place, hook, evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvconform.errors import Place
from kvconform.judge.describe import cause
from kvconform.judge.narrate import evidence_of, narrate
from kvconform.judge.records import Row, Verdict
from verdict_rig import AXES, requirement, trace

Event = dict[str, Any]
CHECKS: dict[str, dict[str, Any]] = {
    "hook.no-raise": {"event": "hook.returned", "always": "e.error is None"},
    "lifecycle.quiet": {"event": "hook.returned", "always": "e.error is None"},
    "load.position": {"event": "kv.wrong", "never": "e.found == 'other_position'"},
    "blocks.owned": {"event": "block", "always": "e.owner"},
    "compose.null-effect": {
        "relate": {
            "runs": ["connector", "no-connector"],
            "event": "sample",
            "project": "e.token",
        }
    },
}
REQUIREMENTS = {name: requirement(name, **fields) for name, fields in CHECKS.items()}
CITED = "v1/x.py: X.y"
RAISED: Event = {
    "kind": "hook.returned",
    "hook": "get_finished",
    "error": "KeyError",
    "error_text": "KeyError: 'a'",
    "error_at": ["conn.py", 12, "_grow", "self.blocks.pop(req)"],
    "layer": None,
}
SCHEDULED: Event = {"kind": "req.scheduled", "req": "a", "generation": 0, "table": [5, 6, 7]}
WRONG: Event = {
    "kind": "kv.wrong",
    "req": "b",
    "layer": 0,
    "kv": "both",
    "pos": 4,
    "count": 4,
    "block": 9,
    "via": "external",
    "found": "other_position",
    "origin": "token 7 at position 0 of request a",
    "origin_req": "a",
    "origin_pos": 0,
    "group": None,
}
CHECK = "`e.x` is false: e.x=0"


def failed(name: str, event: int | None, **fields: Any) -> Row:
    known = {"message": CHECK, "check": CHECK, "evidence": CITED, "verdict": Verdict.FAIL}
    return Row(name, "lifecycle.one", **AXES, event=event, **{**known, **fields})


def told(row: Row, *events: Event) -> Row:
    """The row, after the facts about the events were filled in."""
    run = trace(*events)
    run[0] |= {"block_size": 4, "groups": 1, "context_ranks": 1}
    narrate([row], run, REQUIREMENTS)
    return row


def test_an_error_has_its_cause_place_hook_and_sentence() -> None:
    row = told(failed("hook.no-raise", 1), RAISED)
    assert row.cause == cause(RAISED) and {"KeyError", "_grow"} < set(row.cause)
    assert row.place == Place("conn.py", 12, "_grow", "self.blocks.pop(req)")
    assert row.hook == "get_finished"
    assert (row.message or "").startswith("get_finished raised KeyError: 'a'")
    assert row.check == CHECK and CHECK not in (row.message or "")
    nowhere = told(failed("hook.no-raise", 1), {**RAISED, "error_at": None})
    assert nowhere.place is None and nowhere.cause and nowhere.cause != row.cause


@pytest.mark.parametrize(
    ("hook", "owner"),
    [
        ("get_finished", "KVConnectorBase_V1"),
        ("request_finished", "KVConnectorBase_V1"),
        ("request_finished_all_groups", "SupportsHMA"),
    ],
)
def test_the_evidence_about_a_hook_is_its_own_documentation(hook: str, owner: str) -> None:
    row = told(failed("hook.no-raise", 1), {**RAISED, "hook": hook})
    assert (row.evidence or "").endswith(f": {owner}.{hook}")


def test_other_evidence_is_what_the_requirement_cites() -> None:
    assert told(failed("lifecycle.quiet", 1), RAISED).evidence == CITED
    called = {"kind": "hook.called", "hook": "get_finished", "half": "worker", "bound": None}
    assert evidence_of(called) is None
    assert told(failed("hook.no-raise", 1), called).evidence == CITED


def test_wrong_bytes_are_followed_to_where_they_came_from() -> None:
    row = told(failed("load.position", 2, req="b"), SCHEDULED, WRONG)
    sentence, story = (row.message or "").split("; ")
    assert "positions 4-7 of request b" in sentence
    assert "block 5 of request a held position 0" in story
    unknown = {**WRONG, "origin_req": None, "origin_pos": None}
    assert told(failed("load.position", 2, req="b"), SCHEDULED, unknown).message == sentence


def test_a_message_that_only_repeats_the_check_leaves_one_of_them() -> None:
    block = {"kind": "block", "op": "free", "id": 3, "owner": None}
    row = told(failed("blocks.owned", 1), block)
    assert (row.message, row.check) == (CHECK, None) and row.finding == CHECK
    assert row.cause == ("block",)


@pytest.mark.parametrize(
    "changed", [{"verdict": Verdict.BLOCKED, "event": 1}, {"verdict": Verdict.FAIL, "event": None}]
)
def test_a_verdict_without_an_event_of_its_own_keeps_its_message(changed: dict[str, Any]) -> None:
    row = told(replace(failed("hook.no-raise", 1), **changed), RAISED)
    assert (row.message, row.check) == (CHECK, None)
    assert row.cause == () and row.place is None and row.hook is None


def test_what_is_said_about_another_run_comes_last() -> None:
    sample = {"kind": "sample", "req": "a", "generation": 0, "index": 2, "token": 5}
    row = failed("compose.null-effect", 1, message="without it: 6", check=None)
    assert (told(row, sample).message or "").endswith(" is 5; without it: 6")
    row = failed("compose.null-effect", 1, message="without it: 6", check=None)
    assert told(row, RAISED).message == "without it: 6", "not about the event that is compared"
