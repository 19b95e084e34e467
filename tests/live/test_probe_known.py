# SPDX-License-Identifier: Apache-2.0
"""Tests of the live probe's knowledge of requests, of the cache's shape, and of rank reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvconform.live.state import Roster, described, identity_of, shape_of
from kvconform.live.trace import _every_rank


def request(req: str, tokens: list[int], **fields: Any) -> Any:
    """As much of a vLLM request as is looked at."""
    return SimpleNamespace(request_id=req, all_token_ids=tokens, **fields)


def test_equal_tokens_have_equal_content_unless_the_identity_differs() -> None:
    roster = Roster()
    plain, same, salted = (
        request("a", [1, 2, 3]),
        request("b", [1, 2, 4]),
        request("c", [1, 2, 3], cache_salt="pepper"),
    )
    for one in (plain, same, salted):
        roster.add(one)
    ids, anyhow = zip(*(roster.chain(one) for one in (plain, same, salted)), strict=True)
    assert ids[0][:2] == ids[1][:2] and ids[0][2] != ids[1][2]
    assert not set(ids[0]) & set(ids[2]) and anyhow[0] == anyhow[2]


def test_a_chain_grows_with_its_request_and_forgets_what_was_dropped() -> None:
    roster, one = Roster(), request("a", [1, 2])
    roster.add(one)
    before = list(roster.chain(one)[0])
    one.all_token_ids = [1, 2, 3, 4]
    assert roster.chain(one)[0][:2] == before and len(roster.chain(one)[0]) == 4
    one.all_token_ids = [1, 2, 3]
    assert len(roster.chain(one)[0]) == 3


def test_an_id_that_comes_again_is_another_incarnation() -> None:
    roster = Roster()
    assert roster.generation("a") == 0
    roster.add(request("a", [1]))
    roster.add(request("a", [2]))
    assert roster.generation("a") == 1 and roster.generation("nobody") == 0


def test_what_a_request_is_made_of_besides_its_tokens() -> None:
    item = SimpleNamespace(mm_position=SimpleNamespace(offset=1, length=2), identifier="image")
    lora = SimpleNamespace(lora_name="adapter")
    seen = [
        identity_of(request("a", [], **fields))
        for fields in ({}, {"lora_request": lora}, {"mm_features": [item]})
    ]
    assert len(set(seen)) == 3
    assert seen[2].spans[0][:2] == (1, 3)
    fields = {"cache_salt": "s", "lora_request": lora, "mm_features": [item]}
    assert described(request("a", [], **fields)) == {
        "salt": "s",
        "adapter": {"name": "adapter", "path": None, "number": None},
        "items": [{"at": 1, "length": 2, "id": "image"}],
        "embeds": None,
    }


def test_a_request_is_admitted_with_kv_that_the_model_did_not_write() -> None:
    roster = Roster()
    roster.add(request("a", [1] * 100))
    known = roster.known["a"]
    known.admitted(40, 32)
    # Block 1 is in part another's.
    assert (known.valid_end, known.named, known.shared) == (40, 1, 1)
    known.admitted(64, 32)
    assert (known.named, known.shared) == (2, None)


def test_the_shape_of_a_cache_with_several_groups() -> None:
    full = SimpleNamespace(block_size=16, num_kv_heads=2)
    sliding = SimpleNamespace(block_size=16, num_kv_heads=2, sliding_window=8)
    groups = [
        SimpleNamespace(kv_cache_spec=full, layer_names=["x", "y"]),
        SimpleNamespace(kv_cache_spec=sliding, layer_names=["z"]),
    ]
    shape = shape_of(SimpleNamespace(num_blocks=9, kv_cache_groups=groups))
    assert shape.names == ["x", "y", "z"] and shape.block_size == 16
    assert [(group.kind, group.layers, group.window) for group in shape.groups] == [
        ("full", (0, 1), None),
        ("sliding", (2,), 8),
    ]


def test_a_step_of_several_ranks_is_told_of_as_one() -> None:
    events = [
        {"kind": "worker.step_end", "step": step, "ranks": [rank]}
        for step, rank in ((1, 0), (1, 1), (2, 0))
    ]
    _every_rank(events)
    assert [event["ranks"] for event in events] == [[0, 1], [0, 1], [0]]
