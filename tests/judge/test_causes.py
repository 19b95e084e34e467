# SPDX-License-Identifier: Apache-2.0
"""Tests of the causes of failures, per kind of event.

Particulars such as names, numbers and steps do not make another cause; another kind of fault does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvconform.contract.events import EVENTS, check_event
from kvconform.judge.describe import _CAUSE, cause

Fields = dict[str, Any]
EMPTY = {"str": "x", "int": 0, "bool": False, "float": 0.0, "list": [], "dict": {}, "any": None}


def event(kind: str, **fields: Any) -> Fields:
    """An event with all its fields; those not given are empty."""
    known = {
        name: None if field.optional else EMPTY[field.type]
        for name, field in EVENTS[kind].fields.items()
    }
    made = {"kind": kind, "seq": 0, "step": 1, **known, **fields}
    assert not check_event(made)
    return made


@dataclass
class Faults:
    """A fault, the same fault with other particulars, and other faults.

    `alike` and `others` name the fields that differ from `first`.
    """

    first: Fields = field(default_factory=dict)
    alike: Fields = field(default_factory=dict)
    others: list[Fields] = field(default_factory=list)


AT = ["conn.py", 12, "_grow", "raise KeyError(req)"]
MOVED = {"error_at": ["conn.py", 31, "_grow", "raise KeyError(req)"]}
ELSEWHERE: list[Fields] = [
    {"error_at": ["store.py", 12, "_grow", "raise KeyError(req)"]},
    {"error_at": ["conn.py", 12, "_drop", "raise KeyError(req)"]},
    {"error_at": ["conn.py", 12, "_grow", "self.blocks.pop(req)"]},
    {"error_at": None},
]
STATS = ("encode", "rebuild", "observe")
WRITES = ("shared", "over_computed", "null_block", "unallocated", "other_request")

FAULTS: dict[str, Faults] = {
    "kv.wrong": Faults(
        {"req": "a", "found": "poison", "via": "external", "pos": 4, "count": 3},
        {"req": "b", "pos": 9, "count": 1, "layer": 1, "kv": "k", "block": 7, "origin": "y"},
        [{"found": "torn"}, {"via": "local"}, {"damaged": True}],
    ),
    "kv.changed": Faults(
        {"after_hook": "start_load_kv", "not_transferred": [4]},
        {"req": ["b"], "layer": 1, "not_transferred": [5, 6]},
        [{"after_hook": "get_finished"}, {"not_transferred": []}, *({k: [1]} for k in WRITES)],
    ),
    "load.due": Faults(
        {"req": "a", "missing": [3], "granted": 8},
        {"req": "b", "missing": [4, 5], "granted": 16, "local": 4},
        [{"missing": []}, {"wrong": [3]}],
    ),
    "hook.returned": Faults(
        {"hook": "get_finished", "error": "KeyError", "error_text": "KeyError: a", "error_at": AT},
        {"error_text": "KeyError: b", "layer": "layer.1", **MOVED},
        [{"hook": "shutdown"}, {"error": "OSError"}, *ELSEWHERE],
    ),
    "hook.called": Faults(
        {"hook": "get_finished", "half": "worker"},
        {"bound": True},
        [{"hook": "wait_for_save"}, {"half": "scheduler"}],
    ),
    "engine.lifecycle": Faults(
        {"op": "shutdown", "error": "OSError: 3", "error_type": "OSError", "error_at": AT},
        {"error": "OSError: 4", **MOVED},
        [{"op": "restart"}, {"error_type": "KeyError"}, *ELSEWHERE],
    ),
    "engine.crash": Faults(
        {"where": "hook", "hook": "get_finished", "error_type": "OSError", "error_at": AT},
        {"error": "OSError: 4", **MOVED},
        [{"where": "engine"}, {"hook": "shutdown"}, {"error_type": "KeyError"}, *ELSEWHERE],
    ),
    "thread.died": Faults(
        {"thread": "one", "in_step": 3, "error_type": "OSError", "error_at": AT},
        {"thread": "two", "in_step": 4, "error": "OSError: 4", **MOVED},
        [{"error_type": "KeyError"}, *ELSEWHERE],
    ),
    "cache.reset": Faults({"phase": "asked"}, {"returned": True}, [{"phase": "returned"}]),
    "profile.expectation": Faults(
        {"what": "all", "req": "a", "promised": 8},
        {"req": "b", "of": "c", "promised": 12, "reloadable": 4},
        [{"what": "prompt"}, {"restarted": True}],
    ),
    "case.expectation": Faults({"what": "outputs"}, {"detail": "3"}, [{"what": "aborted"}]),
    "engine.api": Faults({"item": "one"}, {"detail": "why"}, [{"item": "another"}]),
    "api": Faults({"item": "one"}, {"detail": "why"}, [{"item": "another"}]),
    "pair.engine": Faults(
        {"on": "p", "role": "kv_producer"}, {"delivery": True}, [{"on": "d"}, {"role": "kv_both"}]
    ),
    "pair.lookup": Faults(
        {"on": "d", "role": "kv_consumer", "req": "a", "stale": "gone"},
        {"req": "b", "of": "c", "local": 4, "tokens": 8, "stale": "unknown"},
        [{"on": "p"}, {"role": "kv_both"}, {"stale": None}],
    ),
    "pair.params": Faults(
        {"on": "d", "req": "a", "json": "[1]"},
        {"req": "b", "of": "c", "json": "[2]"},
        [{"on": "p"}, {"none": True}, {"json": None}],
    ),
    "pair.request": Faults(
        {"on": "d", "req": "a", "gone": True, "loaded": 4, "released": 3},
        {"req": "b", "of": "c", "loaded": 8, "promised": 12, "released": 7},
        [{"on": "p"}, {"wrong": True}, {"failed": True}, {"gone": False}, {"released": 0}],
    ),
    "lookup": Faults(
        {"req": "a", "tokens": 4, "known": 13, "computed_before_reset": 2},
        {"req": "b", "tokens": 8, "known": 17, "local": 4, "computed_before_reset": 6},
        [
            {"tokens": None},
            {"tokens": 13},
            {"tokens": 14},
            {"tokens": -1},
            {"is_async": True},
            {"computed_before_reset": 0},
        ],
    ),
    "device.note": Faults(
        {"hook": "start_load_kv", "what": "sync"},
        {"text": "cudaStreamSynchronize", "layer": "layer.1"},
        [{"hook": "get_finished"}, {"what": "read_early"}],
    ),
    "transfer.reported": Faults(
        {"req": "a", "direction": "recv"},
        {"req": "b", "rank": 1},
        [{"direction": "send"}, {"held": True}, {"second": True}],
    ),
    "transfer.failed": Faults(
        {"blocks": [1], "outside_grant": [1]},
        {"blocks": [2, 3], "outside_grant": [2, 3]},
        [{"outside_grant": []}],
    ),
    "meta.built": Faults(
        {"pickle_error": "TypeError: lock"},
        {"pickle_error": "TypeError: file"},
        [{"pickle_error": None}, {"none": True}, {"output_mutated": True}],
    ),
    "meta.bound": Faults({}, {"step": 9}, [{"same_as_built": True}]),
    "kv.event": Faults(
        {"op": "stored", "problem": "block_size is 3", "keys": [1]},
        {"problem": "block_size is 5", "keys": [2, 3], "tokens": 8},
        [{"op": "removed"}, {"problem": ""}, {"repeated": True}],
    ),
    "stats.taken": Faults(
        {"half": "worker"},
        {"empty": True},
        [{"half": "scheduler"}, {"kept": True}, {"merge": "TypeError: x"}],
    ),
    "worker.reports": Faults(
        {"what": ["kv_connector_worker_meta"], "pickle_error": "TypeError: lock"},
        {"pickle_error": "TypeError: file"},
        [{"pickle_error": None}],
    ),
    "stats.sent": Faults({}, {"empty": True}, [{name: "TypeError: x"} for name in STATS]),
    "stats.compared": Faults(
        {"what": "bytes_loaded", "name": "bytes", "place": "log"},
        {"value": 4096.0, "seen": 8192, "most": 8192},
        [{"what": "tokens_granted"}, {"name": "loaded"}, {"place": "metrics"}],
    ),
    "handshake": Faults({}, {"detail": "TypeError"}, [{"none": True}]),
    "hold": Faults(
        {"req": "a", "direction": "send", "cause": "finish"},
        {"req": "b"},
        [{"direction": "recv"}, {"cause": "async load"}],
    ),
    "plan": Faults(
        {"op": "load", "timing": "before_forward", "req": "a", "start": 0, "end": 4},
        {"req": "b", "start": 4, "end": 12, "computed": 3, "scheduled": 2, "known": 9},
        [{"op": "save"}, {"timing": "after_forward"}],
    ),
    "engine.id": Faults({"half": "worker"}, {"rank": 1}, [{"half": "scheduler"}]),
    "report.landed": Faults(
        {"changed": ["finished_sending"]}, {"changed": ["invalid_block_ids"]}, [{"changed": []}]
    ),
    "relay.broken": Faults(
        {"way": "reports", "what": ["finished_recving"]},
        {"what": ["invalid_block_ids"]},
        [{"way": "metadata"}],
    ),
    "state.offered": Faults(
        {"req": "a", "block": 3},
        {"req": "b", "block": 4, "group": 1, "tokens": 8},
        [{"in_table": True}, {"again": True}],
    ),
    "kv.registered": Faults(
        {"layout": "NHD"},
        {"shape": [1, 2], "strides": [2, 1]},
        [{"layout": "HND"}, {"required": "HND"}],
    ),
    "run.end": Faults(
        {"unfinished": ["a"], "free_blocks": 5, "free_blocks_at_start": 7},
        {"unfinished": ["b", "c"], "free_blocks": 3},
        [
            {"unfinished": []},
            {"free_blocks": 7},
            {"request_objects_alive": ["a"]},
            {"threads": 2},
        ],
    ),
    "soak.grown": Faults(
        {"holder": "worker half", "place": "futures", "numbers": [5, 10, 15]},
        {"numbers": [6, 18, 30]},
        [{"holder": "scheduler half"}, {"place": "tables"}],
    ),
    "soak.served": Faults(
        {"rounds": 15, "first": 16, "last": 0},
        {"rounds": 24, "first": 32, "last": 8},
        [],
    ),
    "soak.shrunk": Faults(
        {"holder": "worker half", "place": "free", "numbers": [15, 10, 5]},
        {"numbers": [30, 18, 6]},
        [{"holder": "scheduler half"}, {"place": "buffers"}],
    ),
    "restart.grown": Faults(
        {"what": "files", "numbers": [1, 2, 3]},
        {"numbers": [2, 4, 6]},
        [{"what": "KV tensors"}],
    ),
    "live.tokens": Faults(
        {"req": "a", "phase": "one"},
        {"req": "b", "phase": "two", "prompt": 9, "count": 4, "plain": 5},
        [{"same": True}],
    ),
    "live.load": Faults(
        {"req": "a", "wrong": [2]},
        {"req": "b", "wrong": [3, 4], "blocks": 9, "granted": 64},
        [{"wrong": []}, {"missing": [2]}],
    ),
    "live.entered": Faults(
        {"req": "a", "salt": None, "sent_salt": "x"},
        {"req": "b", "salt": None, "sent_salt": "y"},
        [{"salt": "x", "adapter": None, "sent_adapter": "one"}],
    ),
    "live.end": Faults(
        {"how": "ended", "processes": ["server"]},
        {"processes": ["other"]},
        [{"how": "crash"}, {"processes": []}, {"ports": [80]}, {"files": ["psm_1"]}],
    ),
}
OTHERS = [(kind, other) for kind, faults in FAULTS.items() for other in faults.others]


def test_every_kind_that_has_causes_is_here() -> None:
    assert set(_CAUSE) <= set(FAULTS)


@pytest.mark.parametrize("kind", FAULTS)
def test_particulars_do_not_make_a_cause(kind: str) -> None:
    first = event(kind, **FAULTS[kind].first)
    alike = event(kind, **{**FAULTS[kind].first, **FAULTS[kind].alike})
    assert first != alike
    assert cause(first) == cause(alike) == cause({**alike, "seq": 99, "step": 7})
    assert cause(first)[0] == kind


@pytest.mark.parametrize(("kind", "other"), OTHERS)
def test_another_fault_has_another_cause(kind: str, other: Fields) -> None:
    first = FAULTS[kind].first
    assert cause(event(kind, **first)) != cause(event(kind, **{**first, **other}))


def test_a_cause_holds_the_line_that_raised_but_not_its_number() -> None:
    found = cause(event("hook.returned", hook="shutdown", error="KeyError", error_at=AT))
    assert found == ("hook.returned", "shutdown", "KeyError", AT[0], AT[2], AT[3])


def test_one_report_too_many_is_one_fault_whether_the_engine_still_waited_or_not() -> None:
    reports = [event("transfer.reported", direction="send", held=held) for held in (True, False)]
    assert cause(reports[0]) != cause(reports[1])
    assert cause(reports[0], again=True) == cause(reports[1], again=True)
    other = event("transfer.reported", direction="recv")
    assert cause(other, again=True) != cause(reports[0], again=True)
