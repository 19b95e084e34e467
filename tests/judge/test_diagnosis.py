# SPDX-License-Identifier: Apache-2.0
"""Tests of the sentence about an event.

Every kind on which a requirement can fail has one. It names the bytes and the request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core_rig import REFERENCE, ROUND_TRIP, run_case
from kvconform.contract.events import EVENTS
from kvconform.contract.loader import load_spec
from kvconform.judge.describe import _CAUSE, cause, describe, place, spans

Event = dict[str, Any]

STALL: Event = {"kind": "engine.stall", "steps": 60, "limit": 2.0, "threads": 0}


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([3, 4, 5], "3-5"),
        ([9, 1, 2, 4], "1-2, 4, 9"),
        (range(0, 20, 2), "0, 2, 4, 6, 8, 10, ..."),
    ],
)
def test_spans(numbers: Any, text: str) -> None:
    assert spans(numbers) == text


WRONG = {
    "kind": "kv.wrong",
    "req": "b",
    "layer": 1,
    "kv": "v",
    "pos": 12,
    "count": 3,
    "block": 7,
    "via": "external",
    "found": "other_request",
    "origin": "token 5 at position 3 of request a",
}
CHANGED = {
    "kind": "kv.changed",
    "after_hook": "start_load_kv",
    "layer": 0,
    "req": ["b"],
    "shared": [4, 5],
    "over_computed": [],
    "null_block": [],
    "unallocated": [44],
    "other_request": [],
    "tail": [],
}
DUE = {
    "kind": "load.due",
    "req": "b",
    "local": 4,
    "granted": 8,
    "missing": [7, 8, 11],
    "wrong": [],
    "reported_failed": False,
}
END = {
    "kind": "run.end",
    "unfinished": ["a"],
    "free_blocks": 3,
    "free_blocks_at_start": 5,
    "request_objects_alive": ["a", "b"],
    "threads": 0,
}
HOOK = {
    "kind": "hook.returned",
    "hook": "save_kv_layer",
    "layer": "l0",
    "error": "OSError",
    "error_text": "OSError: full",
    "error_at": None,
    "mutated_args": False,
    "value": "None",
}
LOOKUP = {
    "kind": "lookup",
    "req": "b",
    "known": 13,
    "local": 4,
    "tokens": 8,
    "is_async": True,
    "ever_computed": 9,
    "ever_plain": 11,
}
PLAN = {
    "kind": "plan",
    "op": "save",
    "start": 4,
    "end": 12,
    "req": "b",
    "timing": "before_forward",
    "computed": 1,
    "scheduled": 2,
    "placeholders": 3,
    "known": 9,
}


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            WRONG,
            [
                "V of positions 12-14 of request b",
                "layer 1",
                "block 7",
                "loaded by the connector",
                "other request",
                WRONG["origin"],
            ],
        ),
        (
            {**WRONG, "count": 1, "kv": "both", "via": "local"},
            ["K and V of position 12 of", "local prefix cache"],
        ),
        ({**WRONG, "via": "own"}, ["computed by the request itself"]),
        (
            CHANGED,
            [
                "start_load_kv",
                "slots 4-5 belong to the local prefix cache hit",
                "slots 44 belong to no request",
                "for b",
            ],
        ),
        ({**CHANGED, "req": []}, ["for no request"]),
        (
            DUE,
            [
                "8 tokens granted to b from position 4",
                "positions 7-8, 11 were never written",
                "no failure was reported",
            ],
        ),
        ({**DUE, "missing": [11]}, ["position 11 was never written"]),
        ({**DUE, "layers": [2, 3]}, ["positions 7-8, 11 were never written in layers 2-3 and no"]),
        ({**WRONG, "group": 1}, ["layer 1 of KV cache group 1, block 7"]),
        ({**CHANGED, "group": 0}, ["(layer 0 of KV cache group 0, for b)"]),
        (
            {**DUE, "by_group": [[1, 4, [7, 8, 11], [0, 5, 6]]]},
            [
                "never written",
                (
                    "KV cache group 1 (4 tokens per block) lacks 7-8, 11 in blocks 5-6 of its "
                    "table [0, 5, 6]"
                ),
            ],
        ),
        (
            {
                "kind": "alloc",
                "req": "b",
                "external": 8,
                "local": 4,
                "blocks": [1],
                "tables": [[4, 0, [1]], [4, 6, [0]]],
            },
            ["[0] of KV cache group 1"],
        ),
        ({**DUE, "missing": []}, ["the load of b was due"]),
        (END, ["requests a are still there", "3 blocks are free, 5", "Request objects of a, b"]),
        (
            {**END, "unfinished": [], "free_blocks": 5, "request_objects_alive": []},
            ["nothing was left over"],
        ),
        ({**END, "threads": 2}, ["after the shutdown, 2 threads went on"]),
        (HOOK, ["save_kv_layer for l0 raised OSError: full"]),
        (
            {**HOOK, "error_at": ["conn.py", 12, "_grow", "raise OSError('full')"]},
            ["OSError: full: raise OSError('full')"],
        ),
        ({**HOOK, "error": None, "layer": None, "value": "3"}, ["save_kv_layer returned 3"]),
        (
            {**HOOK, "error": None, "mutated_args": True, "hook": "request_finished"},
            ["request_finished changed the argument block_ids"],
        ),
        (
            LOOKUP,
            [
                "b (13 tokens, 4 of them local)",
                "8 tokens (asynchronous)",
                "9 tokens",
                "11 under any",
            ],
        ),
        ({**LOOKUP, "tokens": None}, ["answered None"]),
        ({**LOOKUP, "tokens": 8.0}, ["answered 8.0, a float"]),
        (
            {**LOOKUP, "is_async": False, "tokens": 9},
            ["answered 9 tokens, which leaves nothing to compute; 9 tokens"],
        ),
        (
            {**LOOKUP, "is_async": False, "tokens": 10},
            ["answered 10 tokens, more than the request has"],
        ),
        ({**LOOKUP, "computed_before_reset": 6}, ["6 tokens are from before a reset of its cache"]),
        (
            {"kind": "hook.called", "hook": "wait_for_save", "half": "worker", "bound": False},
            ["wait_for_save", "no step's metadata"],
        ),
        (
            PLAN,
            [
                "save positions 4-11 of b (before forward)",
                "1 token computed, 2 scheduled, 3 placeholders and 9 known",
            ],
        ),
        (
            {"kind": "engine.crash", "error": "AssertionError: x", "hook": "shutdown"},
            ["AssertionError: x (in shutdown)"],
        ),
        (
            {**STALL, "waiting_on": []},
            ["60 steps and 2 s (setting stall_seconds)"],
        ),
        ({**STALL, "threads": 3, "waiting_on": []}, ["3 threads of the connector still ran"]),
        (
            {"kind": "hold", "req": "a", "direction": "recv", "cause": "async load"},
            ["holding a (recv) since async load"],
        ),
        (
            {"kind": "transfer.reported", "req": "a", "direction": "send", "held": False},
            ["finished_sending named a", "was not waiting"],
        ),
        (
            {"kind": "transfer.failed", "req": None, "blocks": [1, 2], "outside_grant": []},
            ["blocks 1-2", "all of them belong to loads"],
        ),
        (
            {"kind": "transfer.failed", "req": "b", "blocks": [], "loading": False},
            ["b was reported as failed", "no load in progress"],
        ),
        (
            {"kind": "engine.lifecycle", "op": "shutdown", "error": "OSError"},
            ["shutdown raised OSError"],
        ),
    ],
)
def test_the_sentence_says_what_where_and_whose(event: Event, words: list[str]) -> None:
    text = describe(event)
    assert text is not None and "\n" not in text
    assert all(word in text for word in words), text


RAISED = {**HOOK, "error_at": ["conn.py", 12, "_grow", "raise KeyError(req)"]}


@pytest.mark.parametrize(
    ("event", "other"),
    [
        (LOOKUP, {**LOOKUP, "req": "alpha", "tokens": 6, "known": 17}),
        (DUE, {**DUE, "missing": [12], "granted": 16}),
        (WRONG, {**WRONG, "kv": "both", "pos": 3, "layer": 0, "group": 1, "origin": "something"}),
        (END, {**END, "unfinished": ["b", "c"], "request_objects_alive": ["b"], "free_blocks": 1}),
        (
            {**STALL, "waiting_on": ["a"]},
            {**STALL, "threads": 2, "waiting_on": []},
        ),
        (
            RAISED,
            {
                **RAISED,
                "error_text": "OSError: b",
                "error_at": ["conn.py", 31, "_grow", "raise KeyError(req)"],
            },
        ),
        (CHANGED, {**CHANGED, "layer": 1, "shared": [6], "unallocated": [1, 2]}),
    ],
)
def test_how_many_and_whose_do_not_make_a_cause(event: Event, other: Event) -> None:
    assert cause(event) == cause(other)
    assert describe(event) != describe(other) or event["kind"] == "engine.stall"


@pytest.mark.parametrize(
    ("event", "other"),
    [
        (LOOKUP, {**LOOKUP, "tokens": 8.0}),
        (LOOKUP, {**LOOKUP, "tokens": 9}),
        (LOOKUP, {**LOOKUP, "tokens": -1}),
        (LOOKUP, {**LOOKUP, "is_async": False}),
        (DUE, {**DUE, "missing": [], "wrong": [3]}),
        (WRONG, {**WRONG, "found": "poison"}),
        (WRONG, {**WRONG, "via": "local"}),
        (END, {**END, "unfinished": []}),
        (END, {**END, "free_blocks": 5}),
        (CHANGED, {**CHANGED, "null_block": [1]}),
        (CHANGED, {**CHANGED, "after_hook": "get_finished"}),
        (RAISED, {**RAISED, "error": "KeyError"}),
        (RAISED, {**RAISED, "hook": "get_finished"}),
        (RAISED, {**RAISED, "error_at": ["conn.py", 12, "_drop", "raise KeyError(req)"]}),
        (RAISED, {**RAISED, "error_at": ["store.py", 12, "_grow", "raise KeyError(req)"]}),
        (RAISED, {**RAISED, "error_at": ["conn.py", 12, "_grow", "self.blocks.pop(req)"]}),
    ],
)
def test_another_fault_is_another_cause(event: Event, other: Event) -> None:
    assert cause(event) != cause(other)


def test_the_place_of_an_error_is_the_connectors_line() -> None:
    assert place(HOOK) is None
    assert str(place(RAISED)) == "conn.py:12, in _grow"


def test_every_cause_is_made_of_fields_that_its_event_has() -> None:
    for kind, names in _CAUSE.items():
        assert {name for name in names if isinstance(name, str)} <= EVENTS[kind].fields.keys()


def test_every_event_of_real_runs_and_of_the_examples_can_be_told(tmp_path: Path) -> None:
    """The fields that `describe` reads must exist.

    This is checked on real events, and for every event kind on which a requirement can fail.
    """
    run = run_case(REFERENCE, ROUND_TRIP, tmp_path)
    told = {e["kind"]: describe(e) for e in run.trace}
    assert {"lookup", "alloc", "load.due", "hook.returned", "run.end", "meta.built", "plan"} <= {
        k for k, text in told.items() if text
    }
    assert {kind for kind, text in told.items() if text} <= set(EVENTS)
    requirements = load_spec().requirements.values()
    silent = {
        r.event
        for r in requirements
        if r.event and r.event not in SELF_EVIDENT and describe_dummy(r.event) is None
    }
    assert not silent


SELF_EVIDENT = {
    "hook.called",
    "layer.wait",
    "step.scheduled",
    "req.scheduled",
    "req.state",
    "req.updated",
    "req.finished",
    "worker.step_begin",
    "worker.step_end",
    "block",
    "kv.computed",
    "release",
    "sample",
    "run.start",
    "meta.cleared",
    "hashes",
    "request.new",
    "request.identity",
}
"""Kinds whose fields say enough by themselves; guarantees of the engine, mostly."""


def describe_dummy(kind: str) -> str | None:
    """Return the kind's sentence, or None, for an event whose fields have dummy values."""
    values = {
        "str": "recv",
        "int": 1,
        "bool": False,
        "float": 0.0,
        "list": [],
        "dict": {},
        "any": None,
    }
    fixed = {"kv": "both", "via": "own", "timing": "before_forward", "how": "crash"}
    fields = {
        name: fixed.get(name, values[field.type]) for name, field in EVENTS[kind].fields.items()
    }
    event = {"kind": kind, "seq": 0, "step": 0, **fields}
    return describe(event)


def test_a_level_that_is_too_full_is_named_first_with_the_bound_that_it_exceeds() -> None:
    def level(name: str, entries: int, used: int, held: int = 0) -> dict[str, object]:
        limits = {"bound": None, "held": held, "bytes": used, "bytes_bound": 512, "full": True}
        return {"name": name, "entries": entries, **limits}

    event = {"kind": "cache.state", "seq": 0, "step": 0, "held": 0}
    event["levels"] = [level("fast", 2, 256), level("held", 6, 768, 6), level("slow", 5, 640)]
    assert describe(event) == (
        "slow has 5, 640 bytes of at most 512 (0 held);"
        " fast has 2, 256 bytes of at most 512 (0 held);"
        " held has 6, 768 bytes of at most 512 (6 held); the cache has 0 holds"
    )


@pytest.mark.parametrize(
    ("gone", "released", "fate"),
    [
        (True, True, "had been released before"),
        (False, True, "were released"),
        (False, False, "were not released"),
    ],
)
def test_a_consumer_that_failed_says_what_became_of_the_blocks(
    gone: bool, released: bool, fate: str
) -> None:
    request = {"req": "d", "on": "two", "of": "p", "loaded": 0, "promised": 8, "wrong": False}
    event = {"kind": "pair.request", "failed": True, "gone": gone, "released": released, **request}
    assert describe(event) == f"d on engine two failed to load; the blocks of p {fate}"
