# SPDX-License-Identifier: Apache-2.0
"""Tests of the paged cache, its shadow, and the time at which blocks are poisoned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core_rig import BLOCK, Machine, output
from kvconform.kernels.codes import CodeBook
from kvconform.kv.cache import PagedCache
from kvconform.kv.oracle import slots_of

TOKENS = list(range(100, 112))


# -- the cache and its shadow


def cache() -> PagedCache:
    return PagedCache(CodeBook(2, 2, 16), 6, BLOCK)


def test_engine_writes_are_not_foreign_and_connector_writes_are_seen_once() -> None:
    made = cache()
    made.write(0, np.array([5, 9]), made.book.rows(np.array([1, 2], dtype=np.uint64))[:, 0])
    assert made.foreign(0).tolist() == []
    made.tensors[0][2, 1, 1, 31] = 3
    made.tensors[1][3] = 1
    assert made.foreign(0).tolist() == [9]
    assert made.foreign(1).tolist() == [12, 13, 14, 15]
    assert made.foreign(0).tolist() == [] and made.foreign(1).tolist() == []


def test_a_nan_is_one_write() -> None:
    made = cache()
    made.tensors[0][1, 0, 2, 0] = float("nan")
    assert made.foreign(0).tolist() == [6]
    assert made.foreign(0).tolist() == []
    made.tensors[0][1, 0, 2, 0] = 0.0
    assert made.foreign(0).tolist() == [6]


def test_content_is_compared_without_the_nonce() -> None:
    made, slots = cache(), np.array([4, 7, 21])
    ids = np.array([1, 2, 3], dtype=np.uint64)
    made.write(1, slots, made.book.rows(ids, nonce=77)[:, 1])
    expected = made.book.rows(ids)[:, 1]
    assert made.mismatches(1, slots, expected).tolist() == []
    assert made.mismatches(1, slots, expected[[0, 2, 1]]).tolist() == [1, 2]
    made.tensors[1][5, 1, 1, 0] += 0.25
    assert made.mismatches(1, slots, expected).tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrower_types_hold_the_same_codes(dtype: torch.dtype) -> None:
    made, slots = PagedCache(CodeBook(2, 2, 16), 6, BLOCK, dtype=dtype), np.array([5, 9])
    rows = made.book.rows(np.array([1, 2], dtype=np.uint64))[:, 0]
    made.write(0, slots, rows)
    assert made.tensors[0].dtype == dtype
    assert made.mismatches(0, slots, rows).tolist() == []
    assert np.array_equal(made.read(0, slots).numpy(), rows)
    assert made.foreign(0).tolist() == []
    made.tensors[0][2, 1, 1, 0] += 1
    assert made.mismatches(0, slots, rows).tolist() == [1]
    assert made.foreign(0).tolist() == [9] and made.untouched


def test_bytes_of_one_type_are_garbage_in_another_of_the_same_size() -> None:
    halves = PagedCache(CodeBook(2, 2, 16), 6, BLOCK, dtype=torch.float16)
    brains = PagedCache(CodeBook(2, 2, 16), 6, BLOCK, dtype=torch.bfloat16)
    slots, rows = np.array([5]), halves.book.rows(np.array([1], dtype=np.uint64))[:, 0]
    halves.write(0, slots, rows)
    brains.tensors[0].view(torch.int16).copy_(halves.tensors[0].view(torch.int16))
    assert brains.mismatches(0, slots, rows).tolist() == [0]


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
    assert (
        made.cache.mismatches(0, np.array([9]), made.cache.read(0, np.array([10])).numpy()).size
        == 0
    )


def test_what_handle_preemptions_writes_is_judged_before_the_poison() -> None:
    made = Machine()
    made.step(output(new=[("a", TOKENS, [1, 2, 3], 0, 12)]))
    made.tables["a"] = [1, 2, 3]
    made.worker.begin(output(new=[("c", [1], [5], 0, 1)]), [(5, "c")])
    made.put(20, 3)
    made.worker.poison_fresh()
    assert [(e["after_hook"], e["unallocated"]) for e in made.events("kv.changed")] == [
        ("handle_preemptions", [20])
    ] * 2


def test_a_connector_may_move_the_tensors_to_shared_memory() -> None:
    """Numpy would go on looking at memory that was freed."""
    book = CodeBook(2, 2, 16)
    cache = PagedCache(book, 8, 4)
    slots, rows = np.arange(4, 12), book.rows(np.arange(8, dtype=np.uint64))
    cache.write(0, slots, rows[:, 0])
    for tensor in cache.tensors:
        tensor.share_memory_()
    assert cache.untouched
    cache.write(1, slots, rows[:, 1])
    assert cache.untouched and not len(cache.mismatches(1, slots, rows[:, 1]))
    cache.tensors[1][2] += 1  # block 2: slots 8 to 11
    assert not cache.untouched
    assert cache.mismatches(1, slots, rows[:, 1]).tolist() == [4, 5, 6, 7]
    assert cache.foreign(1).tolist() == [8, 9, 10, 11]
