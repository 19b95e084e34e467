# SPDX-License-Identifier: Apache-2.0
"""Tests of content ids, the registry, and the name of every kind of wrong slot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconform.compat.vllm_api import model_path
from kvconform.contract.events import PROVENANCE
from kvconform.kernels.codes import CodeBook
from kvconform.kv.provenance import (
    Adapter,
    Chain,
    Diagnosis,
    Identity,
    Memory,
    Origin,
    PartMemory,
    Registry,
    diagnose,
)
from kvconform.kv.rotary import BASE, turned

BOOK = CodeBook(2, 2, 16)
TOKENS = [11, 12, 13, 14, 15, 16]


class World:
    """A reader `a` (incarnation 1, salted) with known tokens, and any other writers."""

    def __init__(self) -> None:
        self.registry = Registry(BOOK)
        self.reader = self.chain("a", 1, TOKENS, "salt")

    def chain(self, req: str, generation: int, tokens: list[int], salt: str | None = None) -> Chain:
        made = Chain(req, generation, Identity.of(salt))
        for pos, token in enumerate(tokens):
            self.registry.note(made.append(token), self._origin(made, pos))
        self.registry.computes(made)
        return made

    def _origin(self, made: Chain, pos: int) -> Origin:
        own = made.identity.own(pos)
        token = made.tokens[pos]
        return Origin("token", made.req, made.generation, pos, made.plain[pos], token, own)

    def row(self, content: int, layer: int = 0) -> np.ndarray:
        """[heads, width] of one content id."""
        return BOOK.rows(np.array([content], dtype=np.uint64), nonce=7)[0, layer].astype(np.float32)

    def diagnose(
        self, row: np.ndarray, *, pos: int = 3, loading: bool = False, kin: set[int] | None = None
    ) -> Diagnosis:
        return diagnose(self.registry, row, 0, self.reader, pos, loading=loading, kin=kin)

    @property
    def right(self) -> np.ndarray:
        return self.row(self.reader.ids[3])


Wrong = Callable[[World], np.ndarray]


def swapped(world: World) -> np.ndarray:
    return np.concatenate([world.right[:, 16:], world.right[:, :16]], axis=1)


def torn(world: World) -> np.ndarray:
    row = world.right
    row[1] = other_tokens(world)[1]
    return row


def unknown(world: World) -> np.ndarray:
    row = world.right
    row[0, 0] += 0.5
    return row


def draft(world: World) -> np.ndarray:
    world.registry.note(99, Origin("draft", "a", 1, 3))
    return world.row(99)


def unsound(world: World) -> np.ndarray:
    return world.row(world.registry.unsound(world.reader.ids[3]))


def past_end(world: World) -> np.ndarray:
    longer = world.chain("a", 1, [*TOKENS, 17], "salt")
    return world.row(longer.ids[-1])


def other_request(world: World) -> np.ndarray:
    """KV of `b`, to which a block of the reader went."""
    world.registry.poison(9, "a", pool=1)
    world.registry.poison(9, "b", pool=1)
    return other_tokens(world)


def other_tokens(world: World) -> np.ndarray:
    return world.row(world.chain("b", 0, [1, 2, 3, 4]).ids[3])


CASES: dict[str, tuple[Wrong, tuple[str, ...]]] = {
    "never_computed": (lambda w: np.zeros((2, 32), dtype=np.float32), ("nothing was written to",)),
    "poison": (lambda w: w.row(w.registry.poison(9, "z")), ("block 9",)),
    "not_yet_loaded": (lambda w: w.row(w.registry.poison(9, "a")), ("block 9",)),
    "other_request": (other_request, ("token 4", "position 3", "request b")),
    "other_tokens": (other_tokens, ("token 4", "position 3", "request b")),
    "other_identity": (
        lambda w: w.row(w.chain("b", 0, TOKENS).ids[3]),
        ("token 14", "position 3", "request b"),
    ),
    "other_prefix": (
        lambda w: w.row(w.chain("b", 0, [1, 2, 3, TOKENS[3]], "salt").ids[3]),
        ("token 14", "position 3", "request b"),
    ),
    "old_position": (
        lambda w: w.row(w.chain("b", 0, [1, TOKENS[3]], "salt").ids[1]),
        ("token 14", "position 1", "request b"),
    ),
    "other_position": (lambda w: w.row(w.reader.ids[2]), ("token 13", "position 2", "request a")),
    "on_failed_load": (unsound, ("token 14", "position 3", "request a", "load that failed")),
    "rejected_draft": (draft, ("draft", "position 3", "request a")),
    "past_end": (past_end, ("token 17", "position 6", "request a")),
    "stale_generation": (
        lambda w: w.row(w.chain("a", 0, [1, 2, 3, 4]).ids[3]),
        ("token 4", "position 3", "request a", "same id"),
    ),
    "torn": (torn, ("mixture", "token 4", "token 14", "request a", "request b")),
    "other_layer": (lambda w: w.row(w.reader.ids[3], layer=1), ("right token", "layer 1")),
    "other_group": (
        lambda w: w.row(w.reader.ids[3], layer=1),
        ("right token", "layer 1", "another block table"),
    ),
    "kv_swapped": (swapped, ("right token", "K and V")),
    "head_swapped": (lambda w: w.right[::-1].copy(), ("right token", "head")),
    "unknown": (unknown, ("no engine",)),
}


def test_every_name_of_the_closed_list_has_a_case() -> None:
    assert set(CASES) == set(PROVENANCE)


@pytest.mark.parametrize(
    "handed_out",
    [
        [(1, 9, "b"), (1, 9, "a")],
        [(1, 9, "a"), (2, 9, "b")],
        [(1, 9, "a"), (1, 8, "b")],
        [(1, 9, "a"), (1, 9, "c"), (1, 8, "b")],
        [(1, 9, "b"), (1, 9, "b")],
        [(1, 9, "a", range(4, 8)), (1, 9, "b", range(4))],
        [(1, 9, "a", range(4)), (1, 9, "b", range(4, 8))],
        [(1, 9, "a", range(4)), (1, 9, "b", range(1, 5))],
    ],
    ids=[
        "before",
        "of another engine",
        "another block",
        "to a third request",
        "its own again",
        "for other positions before",
        "for other positions after",
        "elsewhere in the block",
    ],
)
def test_a_block_changes_hands_only_from_one_with_the_kv(handed_out: list[Any]) -> None:
    world = World()
    for pool, block, owner, *positions in handed_out:
        world.registry.poison(block, owner, pool, *positions)
    assert world.diagnose(other_tokens(world)).found == "other_tokens"


def test_a_block_comes_back_to_its_request_for_other_positions() -> None:
    """What left the window may get the block of what enters it."""
    world = World()
    old = world.chain("p", 0, [*TOKENS, *range(31, 39)], "salt")
    world.registry.computes(old)
    world.registry.poison(9, "p", 1, range(4))
    assert world.diagnose(world.row(old.ids[11])).found == "other_position"
    world.registry.poison(9, "p", 1, range(8, 12))
    assert world.diagnose(world.row(old.ids[11])).found == "other_request"


def test_a_block_changes_hands_in_the_place_of_the_kv() -> None:
    world = World()
    world.registry.poison(9, "a", 1, range(4))
    world.registry.poison(9, "b", 1, range(4))
    assert world.diagnose(other_tokens(world)).found == "other_request"


def test_what_follows_the_wanted_kv_in_another_request_is_kv_of_another_position() -> None:
    """A producer's own output, where its consumer wants the prompt, and still holds the blocks."""
    world = World()
    producer = world.chain("p", 0, [*TOKENS, 31, 32], "salt")
    world.registry.computes(producer)
    held = world.diagnose(world.row(producer.ids[7]))
    assert (held.found, held.req, held.pos) == ("other_position", "p", 7)
    world.registry.poison(9, "a", pool=1)
    world.registry.poison(9, "p", pool=1)
    assert world.diagnose(world.row(producer.ids[7])).found == "other_request"


def test_poison_of_the_destination_is_what_the_load_has_not_written() -> None:
    """Whole or in part; older poison of the block, and that of others, came from elsewhere."""
    world = World()
    old = world.registry.poison(9, "a")
    new = world.registry.poison(9, "a")
    half = world.right.copy()
    half[1] = world.row(new)[1]

    def found(row: np.ndarray, block: int | None) -> str:
        return diagnose(world.registry, row, 0, world.reader, 3, loading=False, block=block).found

    assert [found(world.row(new), 9), found(half, 9)] == ["not_yet_loaded"] * 2
    assert [found(world.row(new), None), found(half, None)] == ["never_computed", "torn"]
    assert [found(world.row(old), 9), found(world.row(new), 8)] == ["never_computed"] * 2


@pytest.mark.parametrize("name", CASES)
def test_bytes_get_their_name_and_their_origin_told(name: str) -> None:
    world = World()
    make, words = CASES[name]
    kin = {0} if name == "other_group" else None  # the layers whose KV lies in the same blocks
    held = world.diagnose(make(world), loading=name == "not_yet_loaded", kin=kin)
    assert held.found == name
    assert held.side == ("k" if name == "unknown" else "both")
    assert all(word in held.origin for word in words), held.origin
    if name == "torn":
        assert (held.req, held.pos) in {("a", 3), ("b", 3)}  # the first that is named
    else:
        assert (held.req, held.pos) == COMPUTED_FOR.get(name, (None, None))


def test_a_mixture_of_positions_of_the_wanted_request_is_not_torn() -> None:
    world = World()
    row = world.right
    row[1] = world.row(world.reader.ids[2])[1]
    held = world.diagnose(row)
    assert (held.found, held.req) == ("other_position", "a")
    assert all(word in held.origin for word in ("mixture", "token 13", "token 14"))


COMPUTED_FOR = {
    "other_request": ("b", 3),
    "other_tokens": ("b", 3),
    "other_identity": ("b", 3),
    "other_prefix": ("b", 3),
    "old_position": ("b", 1),
    "other_position": ("a", 2),
    "on_failed_load": ("a", 3),
    "rejected_draft": ("a", 3),
    "past_end": ("a", 6),
    "stale_generation": ("a", 3),
}


@given(st.data())
def test_whatever_is_in_a_slot_gets_one_name_of_the_list(data: st.DataObject) -> None:
    """Every head and half comes from a source of its own.

    There is always a name; it is `torn` exactly if known contents are mixed, and some of them are
    not the reader's own.
    """
    world = World()
    world.chain("b", 0, [1, 2, 3, 4])
    contents = [*world.registry.origins, 123456789]
    row = np.empty((2, 32), dtype=np.float32)
    used = set()
    for head in range(2):
        for half in (slice(0, 16), slice(16, 32)):
            content = data.draw(st.sampled_from(contents))
            used.add(content)
            row[head, half] = world.row(content)[head, half]
    if used == {world.reader.ids[3]}:
        return
    found, side, origin, *_ = world.diagnose(row, loading=data.draw(st.booleans()))
    assert found in PROVENANCE and side in ("k", "v", "both") and origin
    assert (found == "unknown") == (123456789 in used)
    mixed = len(used) > 1 and 123456789 not in used
    assert (found == "torn") == (mixed and not used <= set(world.reader.ids))


@pytest.mark.parametrize(("half", "side"), [(slice(0, 16), "k"), (slice(16, 32), "v")])
def test_the_wrong_half_is_named(half: slice, side: str) -> None:
    world = World()
    row = world.right
    row[:, half] = world.row(world.reader.ids[2])[:, half]
    assert world.diagnose(row)[1] == side


def test_the_same_token_behind_another_prefix_is_that_whatever_the_id_of_its_request() -> None:
    """A connector that reuses chunks without their prefix finds those of an older namesake, too."""
    for req, generation in (("b", 0), ("a", 0)):
        world = World()
        row = world.row(world.chain(req, generation, [1, 2, 3, TOKENS[3]], "salt").ids[3])
        assert world.diagnose(row).found == "other_prefix"


@pytest.mark.parametrize("owner", ["a", "same"])
def test_poison_of_a_request_with_the_same_tokens_was_taken_too_early(owner: str) -> None:
    world = World()
    same = world.chain("same", 0, TOKENS, "salt")  # notes nothing new: `a` has these tokens, too
    assert same.ids[3] == world.reader.ids[3]
    early = world.diagnose(world.row(world.registry.poison(9, owner)))
    assert (early.found, early.req, early.pos) == ("never_computed", owner, None)
    world.chain("z", 0, [30, 31])
    assert world.diagnose(world.row(world.registry.poison(9, "z")))[0] == "poison"


def test_poison_was_taken_too_early_also_of_tokens_that_were_never_computed() -> None:
    """A request that was aborted in its prefill had blocks for all of the prompt."""
    world = World()
    whole = Chain("b", 0, Identity.of("salt"))
    for token in [*TOKENS, 21, 22, 23]:
        whole.append(token)
    world.reader = whole
    last = len(whole.ids) - 1
    early = world.diagnose(world.row(world.registry.poison(9, "a")), pos=last)
    assert (early.found, early.req) == ("never_computed", "a")
    assert "which it never did" in early.origin
    world.chain("z", 0, [30, 31])
    assert world.diagnose(world.row(world.registry.poison(8, "z")), pos=last).found == "poison"


def test_the_registry_keeps_the_first_origin_but_a_draft_may_become_a_token() -> None:
    registry = Registry(BOOK)
    token, draft_of = Origin("token", "a", 0, 3), Origin("draft", "b", 0, 4)
    registry.note(5, draft_of)
    registry.note(5, token)
    registry.note(5, Origin("token", "c", 0, 3))
    registry.note(5, draft_of)
    assert registry.origins == {5: token}


def test_the_decoder_knows_what_was_noted_since_it_was_last_asked() -> None:
    registry = Registry(BOOK)
    prints = BOOK.fingerprints(np.array([5, 6], dtype=np.uint64))
    registry.note(5, Origin("token", "a", 0, 0))
    assert registry.decode(int(prints[0, 1, 0, 1])) == (5, 1, 0, 1)
    assert registry.decode(int(prints[1, 0, 1, 0])) is None
    registry.note(6, Origin("token", "a", 0, 1))
    assert registry.decode(int(prints[1, 0, 1, 0])) == (6, 0, 1, 0)


def test_every_poisoning_has_a_code_of_its_own() -> None:
    registry = Registry(BOOK)
    assert registry.poison(3, "a") != registry.poison(3, "a")


# -- content ids


def ids(tokens: list[int], **extras: object) -> list[int]:
    chain = Chain("a", 0, Identity.of(**extras))  # type: ignore[arg-type]
    return [chain.append(token) for token in tokens]


IMAGE = {"at": 2, "length": 2, "id": "img"}


@pytest.mark.parametrize(
    ("extras", "first"),
    [
        ({"salt": "s"}, 0),
        ({"adapter": Adapter.of("s")}, 0),
        ({"salt": "s", "adapter": Adapter.of("s")}, 0),
        ({"items": [IMAGE]}, 2),
        ({"items": [{**IMAGE, "at": 3}]}, 3),
        ({"items": [{**IMAGE, "id": "other"}]}, 2),
        ({"embeds": [("speech", 0, len(TOKENS))]}, 0),
    ],
)
def test_identity_changes_the_ids_from_where_it_begins_on(
    extras: dict[str, object], first: int
) -> None:
    plain, with_it = ids(TOKENS), ids(TOKENS, **extras)
    assert [a == b for a, b in zip(plain, with_it, strict=True)] == [
        pos < first for pos in range(len(TOKENS))
    ]


def test_identities_differ_from_each_other() -> None:
    made = [
        ids(TOKENS, **extras)[-1]
        for extras in (
            {},
            {"salt": "x"},
            {"salt": "y"},
            {"adapter": Adapter.of("x")},
            {"adapter": Adapter.of("x", "/elsewhere")},
            {"salt": "x", "adapter": Adapter.of("x")},
            {"embeds": [("x", 0, len(TOKENS))]},
            {"embeds": [("y", 0, len(TOKENS))]},
            {"items": [IMAGE]},
            {"items": [{**IMAGE, "at": 3}]},
            {"items": [{**IMAGE, "id": "other"}]},
            {"items": [{**IMAGE, "length": 3}]},
        )
    ]
    assert len(set(made)) == len(made)


def test_a_moved_image_differs_even_where_the_tokens_are_the_same() -> None:
    """Two windows into one image: the same placeholder tokens, other parts of the item."""
    one = ids([7] * 6, items=[{"at": 0, "length": 6, "id": "img"}])
    two = ids([7] * 6, items=[{"at": 1, "length": 6, "id": "img"}])
    assert not set(one) & set(two)


def test_an_id_depends_on_every_token_before_it() -> None:
    assert ids([1, 2, 3])[:2] == ids([1, 2, 4])[:2]
    assert ids([1, 2, 3])[2] != ids([2, 1, 3])[2]


def test_truncation_forgets_and_the_chain_grows_again_as_before() -> None:
    chain = Chain("a", 0, Identity.of("s"))
    first = [chain.append(token) for token in TOKENS]
    chain.truncate(2)
    assert (chain.tokens, chain.ids, len(chain.plain)) == (TOKENS[:2], first[:2], 2)
    assert chain.peek(TOKENS[2]) == first[2] and len(chain.ids) == 2
    assert [chain.append(token) for token in TOKENS[2:]] == first[2:]
    assert chain.array(1, 3).tolist() == first[1:3]


def test_plain_ids_ignore_identity() -> None:
    one, two = Chain("a", 0, Identity.of("s")), Chain("b", 0, Identity())
    for token in TOKENS:
        one.append(token), two.append(token)
    assert one.plain == two.plain and not set(one.ids) & set(two.ids)


def test_keys_that_were_turned_to_their_new_position_are_the_same_token_behind_another_prefix() -> (
    None
):
    """The nonce is turned with them; keys that were turned too far are no KV of the run."""
    for by, found in ((2, "other_prefix"), (3, "unknown")):
        world = World()
        row = world.row(world.chain("b", 0, [1, TOKENS[3]], "salt").ids[1])
        row[:, :16] = turned(row[:, :16], by)
        assert world.diagnose(row).found == found


def test_a_token_of_the_same_request_may_be_reused_at_another_position() -> None:
    world = World()
    world.reader = world.chain("c", 0, [1, TOKENS[3], 3, TOKENS[3]])
    row = world.row(world.reader.ids[1])
    assert world.diagnose(row).found == "other_position"
    row[:, :16] = turned(row[:, :16], 2)
    assert world.diagnose(row).found == "other_prefix"


def test_the_same_token_of_another_tenant_is_that_behind_any_prefix() -> None:
    world = World()
    row = world.row(world.chain("b", 0, [1, 2, 3, TOKENS[3]], "other").ids[3])
    assert world.diagnose(row).found == "other_identity"


def test_keys_are_turned_as_by_vllm() -> None:
    """`turned` by n is the rotary embedding of position n, with the suite's model's base."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    config = json.loads((Path(model_path()) / "config.json").read_text(encoding="utf-8"))
    assert config["rope_theta"] == BASE
    keys = torch.rand(1, 16)
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(16, 16, 64, BASE, True, torch.float32)
        _, expected = rotary.forward_native(torch.tensor([5]), keys.clone(), keys.clone())
    np.testing.assert_allclose(turned(keys.numpy(), 5), expected.numpy(), atol=1e-5)


def test_a_reset_is_of_what_one_engine_has_stored() -> None:
    parts: list[PartMemory] = []
    whole = Memory()
    one, two = PartMemory(whole, parts), PartMemory(whole, parts)
    one.computed([1, 2], [1, 2])
    two.computed([3], [3])
    one.reset(set())
    assert one.since_reset == {3}, "the other engine may save again what it has computed"
    assert two.since_reset == {1, 2, 3}, "the other engine has not been told of the reset"
    two.computed([1], [1])
    assert one.since_reset == {1, 3}
    assert whole.ever == {1, 2, 3}
