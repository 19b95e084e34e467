# SPDX-License-Identifier: Apache-2.0
"""Tests of a worker's KV, block by block: contents of loaded blocks, writes outside of loads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvconform.contract.events import WRITES
from kvconform.contract.trace import Trace
from kvconform.kv.provenance import HandedOut
from kvconform.live.blocks import BlockOracle, Blocks
from kvconform.live.book import Book, Poisoned
from kvconform.live.state import Granted, Named, StepNote
from kvconform.refimpl.cache.codecs import CODECS

SIZE, LAYERS, NUMBER, WIDTH = 4, 2, 12, 64
CONTENTS = [(100, 1000), (101, 1001), (102, 1002)]


def kv(seed: int, element: Any = torch.float32) -> Any:
    """A block's worth of KV [layers, elements] that no other seed has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, SIZE * WIDTH, generator=generator).to(element)


class Rig:
    """A worker of 12 blocks, whose model has computed three blocks in blocks 1 to 3 (request a)."""

    def __init__(
        self, *, poison: bool = True, tolerance: float | None = None, reused: float | None = None
    ) -> None:
        self.tensors = [torch.zeros(NUMBER, SIZE, WIDTH) for _ in range(LAYERS)]
        self.trace = Trace()
        self.blocks = Blocks(self.tensors, SIZE)
        self.oracle = BlockOracle(self.trace, self.blocks, Book(tolerance, reused), poison=poison)
        self.oracle.begin(
            StepNote(
                1,
                fresh=[HandedOut(b, "a") for b in (1, 2, 3)],
                written={1, 2, 3},
                tables={"a": [1, 2, 3]},
                scheduled=["a"],
            )
        )
        self.oracle.poison_fresh()
        for block, seed in ((1, 0), (2, 1), (3, 2)):
            self.put(block, kv(seed))
        self.oracle.end()
        self.named = [Named(1 + n, *CONTENTS[n], "a", n, tuple(range(1, 1 + n))) for n in range(3)]

    def put(self, block: int, data: Any, layer: int | None = None) -> None:
        """Write a block, or one layer of it."""
        for number in range(LAYERS) if layer is None else [layer]:
            self.tensors[number][block] = data[number].view(SIZE, WIDTH)

    def load(self, *, is_async: bool = False, start: int = 0, end: int = 12) -> None:
        """Grant request b, of 14 tokens, [start, end) of blocks 5 to 7 in step 2.

        It computes at once unless the load is asynchronous.
        """
        granted = Granted("b#0.1", "b", 0, start, end, is_async, [5, 6, 7, 8], CONTENTS)
        granted.alone, granted.known = [1, 2, 3], 14
        note = StepNote(
            2, named=self.named, granted=[granted], fresh=[HandedOut(b, "b") for b in (5, 6, 7, 8)]
        )
        note.tables, note.scheduled, note.written = (
            {"b": [5, 6, 7, 8]},
            [] if is_async else ["b"],
            set() if is_async else {8},
        )
        self.oracle.begin(note)
        self.oracle.poison_fresh()

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [event for event in self.trace.events if event["kind"] == kind]


def test_a_load_of_what_was_computed_is_exact() -> None:
    rig = Rig()
    rig.load()
    for block, seed in ((5, 0), (6, 1), (7, 2)):
        rig.put(block, kv(seed))
    rig.oracle.check("start_load_kv")
    rig.oracle.end()
    (load,), (due,) = rig.kinds("live.load"), rig.kinds("load.due")
    assert load["exact"] == [0, 1, 2] and load["blocks"] == 3
    assert not (load["wrong"] or load["missing"] or load["unknown"] or load["close"])
    assert due["missing"] == [] and due["wrong"] == []
    assert not rig.kinds("kv.wrong")
    outside = ("shared", "over_computed", "null_block", "unallocated", "other_request")
    assert all(not event[kind] for event in rig.kinds("kv.changed") for kind in outside)


@pytest.mark.parametrize(
    "data, found",
    [
        (kv(1), "other_position"),
        (torch.zeros(LAYERS, SIZE * WIDTH), "never_computed"),
        (kv(99), "unknown"),
        (kv(0).flip(0), "other_layer"),
        (kv(0) * 0.9, "unknown"),
    ],
)
def test_wrong_bytes_have_a_name(data: Any, found: str) -> None:
    rig = Rig()
    rig.load()
    for block, block_data in ((5, data), (6, kv(1)), (7, kv(2))):
        rig.put(block, block_data)
    rig.oracle.end()
    (load,), (wrong,) = rig.kinds("live.load"), rig.kinds("kv.wrong")
    assert load["wrong"] == [0] and load["exact"] == [1, 2]
    assert (
        wrong["found"] == found
        and wrong["pos"] == 0
        and wrong["count"] == SIZE
        and wrong["transfer"] == "b#0.1"
    )


def test_rounding_is_told_from_what_is_wrong() -> None:
    rig = Rig()
    rig.load()
    for block, seed in ((5, 0), (6, 1), (7, 2)):
        rig.put(block, kv(seed).to(torch.bfloat16).float())
    rig.oracle.end()
    (load,) = rig.kinds("live.load")
    assert load["close"] == [0, 1, 2] and 0 < load["error"] < 0.01
    assert not rig.kinds("kv.wrong")


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if codec.tolerance])
def test_a_lossy_load_is_held_to_the_declared_tolerance(codec: str) -> None:
    """The codec's own tolerance suffices, and half of its error does not."""
    data = [
        torch.stack([through(codec, layer) for layer in kv(seed).view(LAYERS, SIZE, WIDTH)])
        for seed in range(3)
    ]
    error = max(
        float((layer - want).abs().max() / want.abs().max())
        for seed in range(3)
        for layer, want in zip(data[seed].view(LAYERS, -1), kv(seed), strict=True)
    )
    found = {}
    for tolerance in (CODECS[codec].tolerance, error / 2):
        rig = Rig(tolerance=tolerance)
        rig.load()
        for block, one in zip((5, 6, 7), data, strict=True):
            rig.put(block, one)
        rig.oracle.end()
        (load,) = rig.kinds("live.load")
        found[tolerance] = load["close"], [event["found"] for event in rig.kinds("kv.wrong")]
    within, beyond = found.values()
    assert within == ([0, 1, 2], [])
    assert beyond[1] and set(beyond[1]) == {"unknown"}


def through(codec: str, layer: Any) -> Any:
    """A layer [tokens, values] after it was stored and loaded."""
    data = layer.contiguous().view(torch.uint8).numpy().tobytes()
    stored = CODECS[codec].encode(data, layer.dtype, len(layer))
    loaded = CODECS[codec].decode(stored, layer.dtype)
    return torch.frombuffer(bytearray(loaded), dtype=layer.dtype).view(layer.shape)


def test_a_lossy_load_may_round_where_the_stored_version_is_not_known() -> None:
    def verdict(book: Book, off: float) -> str:
        return book.compare(kv(0) + off * kv(0).abs().max(), CONTENTS, 0).verdict

    own, other, unseen = Book(0.01), Book(0.01), Book(0.01)
    for book in (own, unseen):
        book.enter(*CONTENTS[0], "a", 0, kv(0))
    other.enter(*CONTENTS[0], "a", 0, kv(0), own=False)
    unseen.unseen.add(CONTENTS[0][0])
    assert [verdict(own, off) for off in (0.005, 0.03, 0.2)] == ["close", "wrong", "wrong"]
    assert [verdict(other, off) for off in (0.005, 0.03, 0.2)] == ["close", "close", "wrong"]
    assert [verdict(unseen, off) for off in (0.005, 0.03, 0.2)] == ["close", "unknown", "unknown"]
    for seed in range(1, 12):
        own.enter(*CONTENTS[0], "a", 0, kv(seed))
    assert verdict(own, 0.03) == "close"  # more versions than are kept


def test_a_small_block_is_judged_by_the_largest_value_of_its_layer() -> None:
    book = Book(0.01)
    book.enter(*CONTENTS[0], "a", 0, kv(0))
    book.enter(*CONTENTS[1], "a", 1, kv(1) / 10)
    off = 0.005 * kv(0).abs().max()
    assert book.compare(kv(1) / 10 + off, CONTENTS, 1).verdict == "close"
    assert book.compare(kv(1) / 10 + 4 * off, CONTENTS, 1).verdict == "wrong"


def test_a_block_beyond_the_tolerance_is_said_to_be_off() -> None:
    book = Book(0.01)
    book.enter(*CONTENTS[0], "a", 0, kv(0))
    finding = book.compare(kv(0) * 0.97, CONTENTS, 0)
    assert (finding.found, finding.origin) == (
        "unknown",
        "bytes that differ from the KV of these tokens by 3.0% of the layer's largest value; "
        "1.0% is allowed",
    )


def test_a_token_that_is_wrong_makes_its_block_wrong() -> None:
    rig = Rig()
    rig.load()
    for block, seed in ((5, 0), (6, 1), (7, 2)):
        rig.put(block, kv(seed))
    rig.tensors[1][6, 2] *= -1
    rig.oracle.end()
    assert rig.kinds("live.load")[0]["wrong"] == [1]
    assert rig.kinds("kv.wrong")[0]["layer"] == 1


def test_what_nobody_wrote_is_missing_unless_it_was_reported() -> None:
    for reported in (False, True):
        rig = Rig()
        rig.load()
        rig.put(5, kv(0))
        rig.put(6, kv(1), layer=0)  # and not layer 1
        if reported:
            rig.oracle.errors({6, 7})
        rig.oracle.end()
        (load,), (due,) = rig.kinds("live.load"), rig.kinds("load.due")
        assert load["missing"] == [1, 2] and due["missing"] == list(range(4, 12))
        assert due["reported_failed"] is reported
        assert not rig.kinds("kv.wrong")


def test_bytes_that_come_too_late_were_late_and_not_missing() -> None:
    rig = Rig()
    rig.load(is_async=True)
    rig.oracle.reports(SimpleNamespace(finished_recving={"b"}))
    rig.oracle.end()
    assert rig.kinds("load.due")[0]["missing"] == list(range(12))
    rig.oracle.begin(StepNote(3, tables={"b": [5, 6, 7, 8]}, scheduled=["b"], written={8}))
    for block, seed in ((5, 0), (6, 1), (7, 2)):
        rig.put(block, kv(seed))
    rig.oracle.end()
    assert rig.kinds("load.due")[0]["missing"] == []
    assert {e["found"] for e in rig.kinds("kv.wrong")} == {"not_yet_loaded"} and len(
        rig.kinds("kv.wrong")
    ) == 3
    assert not any(e["over_computed"] for e in rig.kinds("kv.changed"))


def test_a_layer_that_is_read_before_it_is_loaded() -> None:
    rig = Rig()
    rig.load()
    rig.put(5, kv(0))
    rig.put(6, kv(1))
    rig.oracle.read(0)
    rig.put(7, kv(2))
    rig.oracle.read(1)
    rig.oracle.end()
    (wrong,) = rig.kinds("kv.wrong")
    assert wrong["found"] == "not_yet_loaded" and wrong["pos"] == 8 and wrong["layer"] == 0


def test_an_asynchronous_load_is_due_when_it_is_reported() -> None:
    rig = Rig()
    rig.load(is_async=True)
    rig.oracle.end()
    assert not rig.kinds("live.load")
    rig.oracle.begin(StepNote(3, tables={"b": [5, 6, 7, 8]}))
    for block, seed in ((5, 0), (6, 1), (7, 2)):
        rig.put(block, kv(seed))
    rig.oracle.reports(SimpleNamespace(finished_recving={"b"}))
    rig.oracle.end()
    assert rig.kinds("live.load")[0]["exact"] == [0, 1, 2]


@pytest.mark.parametrize(
    "block, kind",
    [(0, "null_block"), (5, "shared"), (8, None), (1, "other_request"), (10, "unallocated")],
)
def test_writes_outside_of_a_load_are_told_apart(block: int, kind: str | None) -> None:
    """None: a block that a load is to fill."""
    rig = Rig()
    rig.load(start=4)
    rig.oracle.note.tables["a"] = [1, 2, 3]
    rig.put(block, kv(7))
    rig.oracle.check("start_load_kv")
    changed = rig.kinds("kv.changed")
    assert [{name: event[name] for name in WRITES if event[name]} for event in changed] == [
        {kind: [block * SIZE]} if kind else {}
    ] * LAYERS
    assert all(event["after_hook"] == "start_load_kv" for event in changed)


def test_only_whole_blocks_are_judged() -> None:
    rig = Rig()
    rig.load(start=2, end=10)
    rig.put(6, kv(1))
    rig.oracle.end()
    load = rig.kinds("live.load")[0]
    assert load["blocks"] == 1 and load["exact"] == [1] and load["missing"] == []


def blended(reused: float | None, off: float, *, layer: int = 1) -> Rig:
    """A rig whose load brings two blocks, the second with one layer that deviates by `off`."""
    rig = Rig(reused=reused)
    rig.load()
    other = kv(1)
    noise = kv(9)[layer]
    other[layer] += noise * (off * other[layer].norm() / noise.norm())
    for block, data in ((5, kv(0)), (6, other), (7, kv(2))):
        rig.put(block, data)
    rig.oracle.end()
    return rig


@pytest.mark.parametrize("declared, off", [(0.5, 0.49), (float("inf"), 5.0)])
def test_kv_of_another_context_is_reused_within_the_declared_tolerance(
    declared: float, off: float
) -> None:
    rig = blended(declared, off)
    (load,), (event,) = rig.kinds("live.load"), rig.kinds("load.blended")
    assert load["reused"] == [1] and load["exact"] == [0, 2]
    assert load["error"] == pytest.approx(off)
    assert (event["reused"], event["again"]) == (SIZE, 14 - 2 * SIZE)
    assert not rig.kinds("kv.wrong")


@pytest.mark.parametrize(
    "declared, off, layer",
    [
        pytest.param(0.5, 0.51, 1, id="beyond-the-tolerance"),
        pytest.param(0.5, 0.2, 0, id="in-the-first-layer"),
        pytest.param(float("inf"), 0.2, 0, id="in-the-first-layer-without-a-tolerance"),
        pytest.param(None, 0.2, 1, id="prefixes-only"),
    ],
)
def test_kv_of_another_context_is_wrong_beyond_it(
    declared: float | None, off: float, layer: int
) -> None:
    rig = blended(declared, off, layer=layer)
    (load,), (wrong,) = rig.kinds("live.load"), rig.kinds("kv.wrong")
    assert load["wrong"] == [1] and not load["reused"]
    assert (wrong["req"], wrong["pos"], wrong["layer"]) == ("b", SIZE, layer)
    assert ("51%" in wrong["origin"] and "50% is declared" in wrong["origin"]) == (off == 0.51)


@pytest.mark.parametrize("index, found", [(1, "other_prefix"), (5, "old_position")])
def test_kv_of_the_same_tokens_elsewhere_has_a_name(index: int, found: str) -> None:
    rig = Rig(reused=0.5)
    rig.oracle.book.enter(500, 5000, "c", index, kv(50), alone=2)
    rig.load()
    for block, data in ((5, kv(0)), (6, kv(50)), (7, kv(2))):
        rig.put(block, data)
    rig.oracle.end()
    (wrong,) = rig.kinds("kv.wrong")
    assert wrong["found"] == found and wrong["origin"] == f"block {index} of request c"
    assert rig.kinds("load.blended")[0]["reused"] == SIZE


def test_what_is_computed_upon_reused_kv_is_not_compared() -> None:
    rig = blended(0.5, 0.4)
    rig.oracle.book.enter(103, 1003, "c", 3, kv(3))
    rig.put(8, computed := torch.stack([kv(3)[0], kv(8)[1]]))
    rig.oracle.begin(StepNote(3, named=[Named(8, 103, 1003, "b", 3, (5, 6, 7))]))
    contents = [*CONTENTS, (103, 1003)]
    assert len(rig.oracle.book.records[103].versions) == 1
    assert rig.oracle.book.compare(computed, contents, 3).verdict == "unknown"


def test_nothing_is_said_about_tokens_that_the_model_has_not_computed() -> None:
    rig = Rig()
    rig.named = []
    rig.load()
    for block in (5, 6, 7):
        rig.put(block, kv(block))
    rig.oracle.end()
    assert rig.kinds("live.load")[0]["unknown"] == [0, 1, 2]
    assert not rig.kinds("load.due") and not rig.kinds("kv.wrong")


def test_what_is_computed_upon_a_wrong_load_teaches_nothing() -> None:
    rig = Rig()
    rig.load()
    for block in (5, 6, 7):
        rig.put(block, kv(50 + block))
    rig.oracle.end()
    rig.put(8, kv(8))
    rig.oracle.begin(StepNote(3, named=[Named(8, 103, 1003, "b", 3, (5, 6, 7))]))
    assert 103 not in rig.oracle.book.records and 102 in rig.oracle.book.records


def test_what_was_computed_upon_wrong_kv_is_no_failure_of_its_own() -> None:
    """A save of such a block, and its load, are as they should be: the first load was wrong."""
    rig = Rig()
    rig.oracle.book.enter(103, 1003, "c", 3, kv(3))
    rig.load()
    for block in (5, 6, 7):
        rig.put(block, kv(50 + block))
    rig.oracle.end()
    rig.put(8, kv(8))
    contents = [*CONTENTS, (103, 1003)]
    granted = Granted("d#0.1", "d", 0, 12, 16, False, [1, 2, 3, 9], contents)
    named = [Named(8, 103, 1003, "b", 3, (5, 6, 7))]
    rig.oracle.begin(StepNote(3, named=named, granted=[granted], scheduled=["d"]))
    before = len(rig.kinds("kv.wrong"))
    rig.put(9, kv(8))
    rig.oracle.end()
    assert rig.kinds("live.load")[-1]["wrong"] == [3]
    assert rig.oracle.book.compare(kv(8), contents, 3).found is None
    assert len(rig.kinds("kv.wrong")) == before
    assert before


@pytest.mark.parametrize("is_known, found", [(True, "other_tokens"), (False, "unknown")])
def test_a_spoiled_block_excuses_no_other_content(is_known: bool, found: str) -> None:
    """Its first layer is that of the right block, which does not depend on other KV."""
    book = Book()
    book.enter(*CONTENTS[0], "a", 0, kv(0))
    spoiled = torch.stack([kv(30)[0], kv(31)[1]])
    book.spoil(300, spoiled)
    if is_known:
        book.enter(300, 3000, "c", 0, kv(30))
        assert book.compare(spoiled, [(300, 3000)], 0).found is None
    assert book.compare(kv(30), CONTENTS, 0).found == found


def test_poison_tells_who_took_a_block_too_early() -> None:
    rig = Rig()
    poison = rig.blocks.poison(10)
    for owner, content, found in (
        ("a", None, "never_computed"),
        ("c", CONTENTS[0][0], "never_computed"),  # "a" was the first, and "c" computes it, too
        ("c", CONTENTS[1][0], "poison"),
        ("c", None, "poison"),
    ):
        rig.oracle.book.poisoners[poison] = [Poisoned(owner, content)]
        rig.oracle.enter(rig.named)
        finding = rig.oracle.book.compare(torch.full((LAYERS, SIZE * WIDTH), poison), CONTENTS, 0)
        assert finding.verdict == "wrong" and finding.found == found


@pytest.mark.parametrize(
    "poisoned, found, owner",
    [
        # An earlier block of "a", the first to compute the content, says nothing about it.
        ([Poisoned("a", CONTENTS[1][0]), Poisoned("c", CONTENTS[2][0])], "poison", "c"),
        ([Poisoned("c", CONTENTS[2][0]), Poisoned("a")], "never_computed", "a"),
        # The block that was to hold the content, before the last one.
        ([Poisoned("d", CONTENTS[0][0]), Poisoned("c")], "never_computed", "d"),
        ([Poisoned("d", CONTENTS[0][0]), Poisoned("a")], "never_computed", "d"),
    ],
)
def test_poison_that_filled_two_blocks(poisoned: list[Poisoned], found: str, owner: str) -> None:
    rig = Rig()
    rig.oracle.enter(rig.named)
    poison = rig.blocks.poison(10)
    rig.oracle.book.poisoners[poison] = poisoned
    finding = rig.oracle.book.compare(torch.full((LAYERS, SIZE * WIDTH), poison), CONTENTS, 0)
    assert (finding.found, finding.origin) == (
        found,
        f"poison that a fresh block of request {owner} held",
    )


def test_other_identity_and_other_tokens_are_told_apart() -> None:
    book = Book()
    book.enter(200, 1000, "salted", 0, kv(20))  # the tokens of CONTENTS[0], under a salt
    book.enter(300, 3000, "else", 0, kv(30))
    book.enter(*CONTENTS[0], "a", 0, kv(0))
    assert book.compare(kv(20), CONTENTS, 0).found == "other_identity"
    assert book.compare(kv(30), CONTENTS, 0).found == "other_tokens"
    assert book.compare(kv(30) * 1.001, CONTENTS, 0).found == "other_tokens"


def test_every_version_that_was_computed_is_right() -> None:
    book = Book()
    book.enter(*CONTENTS[0], "a", 0, kv(0))
    book.enter(*CONTENTS[0], "b", 0, kv(0) * 1.0001)
    assert book.compare(kv(0) * 1.0001, CONTENTS, 0).verdict == "exact"


def test_a_book_outlives_its_process(tmp_path: Path) -> None:
    book, again = Book(), Book()
    book.enter(*CONTENTS[0], "a", 0, kv(0, torch.bfloat16))
    book.enter(*CONTENTS[0], "b", 0, kv(5, torch.bfloat16))
    book.save(tmp_path / "book")
    again.load(tmp_path / "book")
    assert again.compare(kv(0, torch.bfloat16), CONTENTS, 0).verdict == "exact"
    assert again.compare(kv(5, torch.bfloat16), CONTENTS, 0).verdict == "exact"
    assert again.compare(kv(6, torch.bfloat16), CONTENTS, 0).found == "unknown"
    assert "baseline run" in again.records[CONTENTS[0][0]].req
