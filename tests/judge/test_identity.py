# SPDX-License-Identifier: Apache-2.0
"""Tests of the words for how two requests with the same tokens differ."""

from __future__ import annotations

from typing import Any

import pytest

from kvconform.contract.steps import Add
from kvconform.judge.identity import another, apart, differences, differing, told_apart_by

CAT = {"at": 1, "length": 2, "id": "cat"}
DOG = {"at": 4, "length": 2, "id": "dog"}
SONG = {"of": "speech", "until": 3, "then": "song"}
MODEL = "the model or layout since a restart"


def identity(fields: dict[str, Any]) -> dict[str, Any]:
    return Add.model_validate({"req": "a", "prompt": 9, **fields}).identity


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ({"salt": "s"}, {}, "the cache salt ('s' for b, none for a)"),
        ({"lora": "x"}, {}, "the LoRA adapter ('x' for b, none for a)"),
        (
            {"lora": "x"},
            {"lora": {"name": "y", "path": "/p"}},
            "the LoRA adapter ('x' for b, 'y' at /p for a)",
        ),
        (
            {"lora": {"name": "x", "path": "/p", "number": 1}},
            {"lora": {"name": "x", "path": "/q", "number": 2}},
            "the path of the LoRA adapter ('/p' for b, '/q' for a)"
            " and the number of the LoRA adapter (1 for b, 2 for a)",
        ),
        (
            {"embeds": "p", "salt": "s"},
            {"embeds": SONG, "salt": "t"},
            "the cache salt ('s' for b, 't' for a) and the prompt embeddings"
            " ('p' for b, 'speech' and from row 3 on 'song' for a)",
        ),
        ({"mm": [CAT]}, {}, "the multi-modal items ('cat' at 1 for b, none for a)"),
        (
            {"mm": [CAT]},
            {"mm": [CAT | {"at": 2}]},
            "the place of the multi-modal items ('cat' at 1 for b, 'cat' at 2 for a)",
        ),
        (
            {"mm": [CAT, DOG]},
            {"mm": [DOG | {"at": 1}, CAT | {"at": 4}]},
            "the order of the multi-modal items"
            " ('cat' at 1, 'dog' at 4 for b, 'dog' at 1, 'cat' at 4 for a)",
        ),
        ({}, {}, MODEL),
    ],
)
def test_differences(here: dict[str, Any], there: dict[str, Any], words: str) -> None:
    assert apart(differences(identity(here), identity(there)), "b", "a") == words


def test_differences_in_a_few_words() -> None:
    differs = differences(identity({"salt": "s", "mm": [CAT]}), identity({}))
    assert another(differs) == "another cache salt and other multi-modal items"


def test_two_requests_of_one_id_are_named_apart() -> None:
    differs = differences(identity({"salt": "s"}), identity({}))
    assert apart(differs, "a", "a") == "the cache salt ('s' for this a, none for the earlier a)"


def test_what_tells_a_request_apart() -> None:
    fields = {"salt": "s", "lora": "x", "mm": [CAT], "embeds": "p"}
    assert told_apart_by(identity(fields)) == (
        "cache salt 's', LoRA adapter 'x', prompt embeddings 'p', multi-modal items 'cat' at 1"
    )


WRONG = {
    "kind": "kv.wrong",
    "seq": 9,
    "req": "a",
    "generation": 1,
    "found": "other_identity",
    "origin_req": "a",
}


def entered(generation: int, seq: int, **fields: Any) -> list[dict[str, Any]]:
    who = {"req": "a", "generation": generation, "seq": seq}
    return [
        {"kind": "request.identity", **who, **identity(fields)},
        {"kind": "req.scheduled", **who},
    ]


def test_wrong_kv_of_an_earlier_request_of_the_same_id() -> None:
    trace = [*entered(0, 0, salt="s"), *entered(1, 1, salt="t")]
    (found,) = differing(trace, WRONG)
    assert (found["here"], found["there"]) == ("'t'", "'s'")


def test_nothing_is_said_to_differ_that_is_not_known() -> None:
    """Without a restart, it is no other model."""
    trace = [*entered(0, 0, salt="s"), *entered(1, 1, salt="s")]
    assert differing(trace, WRONG) == []
    restart = {"kind": "engine.lifecycle", "op": "restart", "seq": 2}
    assert [each["kind"] for each in differing([*trace, restart], WRONG)] == ["model"]
    assert differing(trace, WRONG | {"found": "other_tokens"}) == []
    assert differing(trace, WRONG | {"origin_req": None}) == []
