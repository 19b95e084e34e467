# SPDX-License-Identifier: Apache-2.0
"""Tests of the paged cache, its shadow, and the time at which blocks are poisoned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from access_rig import foreign, way  # noqa: F401
from core_rig import BLOCK, Machine, output
from kvconform.kernels.codes import CodeBook
from kvconform.kv.cache import PagedCache
from kvconform.kv.content import Content
from kvconform.kv.oracle import slots_of
from kvconform.kv.provenance import HandedOut

TOKENS = list(range(100, 112))


def content(book: CodeBook, *ids: int, nonce: int = 0) -> Content:
    return Content.of(book, np.array(ids, dtype=np.uint64), nonce)


# -- the cache and its shadow


def cache() -> PagedCache:
    return PagedCache(CodeBook(2, 2, 16), 6, BLOCK)


def test_engine_writes_are_not_foreign_and_connector_writes_are_seen_once() -> None:
    made = cache()
    made.write(0, np.array([5, 9]), content(made.book, 1, 2))
    assert foreign(made) == [[], []]
    made.tensors[0][2, 1, 1, 31] = 3
    made.tensors[1][3] = 1
    assert foreign(made) == [[9], [12, 13, 14, 15]]
    assert foreign(made) == [[], []]


def test_a_nan_is_one_write() -> None:
    made = cache()
    made.tensors[0][1, 0, 2, 0] = float("nan")
    assert foreign(made) == [[6], []]
    assert foreign(made) == [[], []]
    made.tensors[0][1, 0, 2, 0] = 0.0
    assert foreign(made) == [[6], []]


def test_content_is_compared_without_the_nonce() -> None:
    made, slots = cache(), np.array([4, 7, 21])
    made.write(1, slots, content(made.book, 1, 2, 3, nonce=77))
    expected = content(made.book, 1, 2, 3)
    assert made.mismatches(1, slots, expected).tolist() == []
    assert made.mismatches(1, slots, expected, np.array([0, 2, 1])).tolist() == [1, 2]
    made.tensors[1][5, 1, 1, 0] += 0.25
    assert made.mismatches(1, slots, expected).tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrower_types_hold_the_same_codes(dtype: torch.dtype) -> None:
    made, slots = PagedCache(CodeBook(2, 2, 16), 6, BLOCK, dtype=dtype), np.array([5, 9])
    expected = content(made.book, 1, 2)
    made.write(0, slots, expected)
    assert made.tensors[0].dtype == dtype
    assert made.mismatches(0, slots, expected).tolist() == []
    assert np.array_equal(made.read(0, slots).numpy(), expected.rows[:, 0])
    assert foreign(made) == [[], []]
    made.tensors[0][2, 1, 1, 0] += 1
    assert made.mismatches(0, slots, expected).tolist() == [1]
    assert foreign(made) == [[9], []] and foreign(made) == [[], []]


def test_bytes_of_one_type_are_garbage_in_another_of_the_same_size() -> None:
    halves = PagedCache(CodeBook(2, 2, 16), 6, BLOCK, dtype=torch.float16)
    brains = PagedCache(CodeBook(2, 2, 16), 6, BLOCK, dtype=torch.bfloat16)
    slots, expected = np.array([5]), content(halves.book, 1)
    halves.write(0, slots, expected)
    brains.tensors[0].view(torch.int16).copy_(halves.tensors[0].view(torch.int16))
    assert brains.mismatches(0, slots, expected).tolist() == [0]


def test_slots_of_a_table() -> None:
    assert slots_of([3, 1, 5], 2, 9, 4).tolist() == [14, 15, 4, 5, 6, 7, 20]
    assert slots_of([3], 2, 2, 4).tolist() == []
    with pytest.raises(IndexError, match="does not reach position 8"):
        slots_of([3, 1], 2, 9, 4)


# -- poison


def test_a_block_is_poisoned_in_the_step_of_its_new_owner_and_not_before() -> None:
    made = Machine()
    made.step(output(new=[("a", TOKENS, [1, 2, 3], 0, 12)]))
    before = made.cache.tensors[0][1:4].clone()
    made.step(output(new=[("b", [1], [5], 0, 1)], finished=["a"]))
    # freed, but readable: a connector may still be reading it
    assert torch.equal(made.cache.tensors[0][1:4], before)
    made.step(output(new=[("c", [1, 2, 3, 4, 5], [1, 2], 0, 5)]), fresh=[(1, "c"), (2, "c")])
    assert [e["id"] for e in made.events("block", op="poison")] == [1, 2]
    poison = {o.pos for o in made.registry.origins.values() if o.kind == "poison" and o.req == "c"}
    assert poison == {1, 2}
    assert torch.equal(made.cache.tensors[0][3], before[2])
    # the rest of block 2
    assert torch.equal(*(made.cache.read(0, np.array([slot])) for slot in (9, 10)))


def test_what_handle_preemptions_writes_is_judged_before_the_poison() -> None:
    made = Machine()
    made.step(output(new=[("a", TOKENS, [1, 2, 3], 0, 12)]))
    made.tables["a"] = [1, 2, 3]
    made.worker.begin(output(new=[("c", [1], [5], 0, 1)]), [HandedOut(5, "c")])
    made.put(20, 3)
    made.worker.poison_fresh()
    assert [(e["after_hook"], e["unallocated"]) for e in made.events("kv.changed")] == [
        ("handle_preemptions", [20])
    ] * 2


def test_a_connector_may_move_the_tensors_to_shared_memory(way: str) -> None:  # noqa: F811
    """Numpy would go on looking at memory that was freed."""
    if way == "kernels":
        pytest.skip("memory of a GPU is not moved")
    book = CodeBook(2, 2, 16)
    cache = PagedCache(book, 8, 4)
    slots, expected = np.arange(4, 12), content(book, *range(8))
    cache.write(0, slots, expected)
    for tensor in cache.tensors:
        tensor.share_memory_()
    assert cache.untouched
    cache.write(1, slots, expected)
    assert cache.untouched and not len(cache.mismatches(1, slots, expected))
    cache.tensors[1][2] += 1  # block 2: slots 8 to 11
    assert not cache.untouched
    assert cache.mismatches(1, slots, expected).tolist() == [4, 5, 6, 7]
    assert foreign(cache) == [[], [8, 9, 10, 11]]
