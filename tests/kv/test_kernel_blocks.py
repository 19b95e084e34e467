# SPDX-License-Identifier: Apache-2.0
"""Tests of caches whose tensors have smaller blocks than the scheduler's."""

from __future__ import annotations

import numpy as np
import pytest

from access_rig import foreign, way  # noqa: F401
from kvconform.kernels.codes import CodeBook
from kvconform.kv.cache import PagedCache, Slice, SlicedCache
from kvconform.kv.content import Content

BOOK = CodeBook(layers=2, heads=2, head_dim=16)
BLOCK, KERNEL = 12, 4
SLOTS = np.arange(2 * BLOCK, 3 * BLOCK)  # of block 2


def content(tokens: int = BLOCK) -> Content:
    return Content.of(BOOK, np.arange(1, tokens + 1, dtype=np.uint64))


def split(layout: str = "LBHNC") -> PagedCache:
    return PagedCache(BOOK, 5, BLOCK, layout=layout, kernel_block_size=KERNEL)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_a_block_is_several_blocks_of_the_tensor(layout: str) -> None:
    cache = split(layout)
    cache.write(0, SLOTS, content())
    tensor = cache.tensors[0].numpy()
    assert tensor.shape == (5 * 3, 2, KERNEL, BOOK.width)
    for part in range(3):
        wanted = content().rows[part * KERNEL : (part + 1) * KERNEL, 0].transpose(1, 0, 2)
        assert np.array_equal(tensor[2 * 3 + part], wanted)
    assert not np.delete(tensor, [6, 7, 8], axis=0).any()
    assert cache.mismatches(0, SLOTS, content()).tolist() == []


def test_foreign_writes_are_found_by_the_schedulers_slots() -> None:
    cache = split()
    cache.tensors[1][2 * 3 + 1, 0, 3] = 5
    assert foreign(cache) == [[], [2 * BLOCK + KERNEL + 3]]
    assert foreign(cache) == [[], []]


def test_the_attention_gets_kernel_blocks_and_the_same_slots() -> None:
    cache = split()
    assert cache.kernel_table(np.array([[3, 1]])).tolist() == [[9, 10, 11, 3, 4, 5]]
    assert cache.mapping(SLOTS, cache.groups[0]).tolist() == SLOTS.tolist()


def test_packed_layouts_keep_whole_blocks() -> None:
    """As vLLM's prepare_kernel_block_sizes: other layers' pages lie between the blocks."""
    cache = split("BLHNC")
    assert cache.kernel_blocks == 1
    assert list(cache.tensors[0].shape) == [5, 2, BLOCK, BOOK.width]


def test_a_block_must_be_whole_kernel_blocks() -> None:
    with pytest.raises(ValueError, match="cannot be split"):
        PagedCache(BOOK, 5, 10, kernel_block_size=KERNEL)


def test_the_share_of_a_rank_is_split() -> None:
    cache = SlicedCache(BOOK, 5, 2 * BLOCK, Slice(1, 2), kernel_block_size=KERNEL)
    slots = np.arange(2 * 2 * BLOCK, 3 * 2 * BLOCK)
    wanted = content(2 * BLOCK)
    cache.write(0, slots, wanted)
    assert np.array_equal(cache.tensors[0][7, :, 1].numpy(), wanted.rows[2 * (KERNEL + 1) + 1, 0])
    cache.tensors[0][7, 0, 1] = 0
    assert cache.mismatches(0, slots, wanted).tolist() == [2 * (KERNEL + 1) + 1]


def test_the_kernel_blocks_of_a_block_are_poisoned_together() -> None:
    cache = split()
    slots = cache.poison(0, np.array([1, 3]), content(3), np.array([2, 0]))
    assert slots.tolist() == [*range(BLOCK, 2 * BLOCK), *range(3 * BLOCK, 4 * BLOCK)]
    for layer in (0, 1):
        assert cache.mismatches(layer, slots, content(3), np.repeat([2, 0], BLOCK)).tolist() == []
    assert not cache.tensors[0][[0, 1, 2, 6, 7, 8]].any() and foreign(cache) == [[], []]
