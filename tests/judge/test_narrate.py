# SPDX-License-Identifier: Apache-2.0
"""Tests of the facts that a failed verdict gets: message, check, cause, place, hook, evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvconform.errors import Place
from kvconform.judge.describe import cause
from kvconform.judge.narrate import evidence_of, narrate
from kvconform.judge.records import AGAIN, Row, Verdict
from verdict_rig import AXES, requirement, trace

Event = dict[str, Any]
CHECKS: dict[str, dict[str, Any]] = {
    "hook.no-raise": {"event": "hook.returned", "always": "e.error is None"},
    "lifecycle.quiet": {"event": "hook.returned", "always": "e.error is None"},
    "load.position": {"event": "kv.wrong", "never": "e.found == 'other_position'"},
    "blocks.owned": {"event": "block", "always": "e.owner"},
    "load.errors-within-grant": {"event": "transfer.failed", "never": "e.outside_grant"},
    "lookup.last-token": {"event": "lookup", "always": "e.local"},
    "save.as-configured": {"event": "lookup.permitted", "always": "e.of"},
    "recv.completes": {
        "event": "alloc",
        "respond": {
            "then": {"event": "transfer.reported", "where": "e.transfer == t.transfer"},
            "by": {"event": "run.end"},
        },
    },
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
    computed = {"kind": "kv.computed", "req": "a", "generation": 0, "start": 0, "end": 4}
    row = told(failed("blocks.owned", 1), computed)
    assert (row.message, row.check) == (CHECK, None) and row.finding == CHECK
    assert row.cause == ("kv.computed",)


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


@pytest.mark.parametrize(
    ("before", "again"), [([5, 6], True), ([5], False), ([], False), ([7, 6, 5], True)]
)
def test_blocks_that_are_reported_again_are_another_cause(before: list[int], again: bool) -> None:
    """A set that is never emptied names what was reported; a load beyond its grant does not."""
    report = {
        "kind": "transfer.failed",
        "req": None,
        "transfer": None,
        "rank": 0,
        "blocks": [5, 6],
        "outside_grant": [5, 6],
    }
    first = {**report, "blocks": before, "outside_grant": []}
    row = told(failed("load.errors-within-grant", 2), first, report)
    assert (AGAIN in row.cause) == again
    elsewhere = told(failed("load.errors-within-grant", 2), {**first, "rank": 1}, report)
    assert AGAIN not in elsewhere.cause


@pytest.mark.parametrize(
    ("tokens", "local", "computed", "known", "expected"),
    [
        (20, 8, 21, 21, True),  # 12 would be right
        (20, 0, 21, 21, False),  # vLLM has nothing to add
        (20, 8, 16, 24, False),  # more than was stored
        (21, 8, 21, 21, False),  # the last token has to be computed
        (None, 8, 21, 21, False),
        (0, 8, 21, 21, False),
    ],
)
def test_a_hit_that_is_right_alone(
    tokens: int | None, local: int, computed: int, known: int, expected: bool
) -> None:
    asked = {
        "kind": "lookup",
        "req": "a",
        "tokens": tokens,
        "local": local,
        "known": known,
        "ever_computed": computed,
        "ever_plain": computed,
        "is_async": False,
    }
    assert told(failed("lookup.last-token", 1), asked).adds_to_itself is expected


@pytest.mark.parametrize(
    ("end", "prompts", "said"),
    [(20, 17, True), (20, 16, False), (24, 17, False), (16, 17, False), (20, None, False)],
)
def test_a_claim_that_ends_with_the_block_of_the_prompts_end(
    end: int, prompts: int | None, said: bool
) -> None:
    claim = {
        "kind": "lookup.permitted",
        "req": "a",
        "end": end,
        "local": 0,
        "prompts": prompts,
        "allowed": 30,
        "of": None,
    }
    message = str(told(failed("save.as-configured", 1), claim).message)
    assert ("that is 17, the end of a prompt, rounded up to whole blocks" in message) == said


@pytest.mark.parametrize(("transfer", "said"), [("t", True), ("u", False)])
def test_a_load_that_is_never_reported_says_whether_it_failed(transfer: str, said: bool) -> None:
    grant = {
        "kind": "alloc",
        "req": "a",
        "external": 8,
        "local": 0,
        "blocks": [4, 5],
        "transfer": "t",
        "is_async": True,
    }
    report = {"kind": "transfer.failed", "req": "a", "transfer": transfer, "rank": 0}
    row = told(failed("recv.completes", 1), grant, {**report, "blocks": [4], "outside_grant": []})
    assert row.headline == "an asynchronous load was never reported as finished"
    assert ("its load failed in step" in str(row.message)) == said
