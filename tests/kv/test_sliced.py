# SPDX-License-Identifier: Apache-2.0
"""Tests of decode context parallelism.

A rank's memory holds every n-th token of a block, and only the tokens that it holds are judged.
"""

from __future__ import annotations

import numpy as np
import pytest

from access_rig import foreign, way  # noqa: F401
from kvconform.kernels.codes import CodeBook
from kvconform.kv.cache import Group, Slice, SlicedCache
from kvconform.kv.content import Content

BLOCK = 8
SLOTS = np.arange(2 * BLOCK, 3 * BLOCK)  # of block 2


def ranks() -> tuple[CodeBook, list[SlicedCache]]:
    book = CodeBook(layers=2, heads=2, head_dim=16)
    groups = [Group("latent", (0, 1), BLOCK, 1)]
    return book, [SlicedCache(book, 4, BLOCK, Slice(rank, 2), groups=groups) for rank in range(2)]


def content(book: CodeBook) -> Content:
    return Content.of(book, np.arange(1, BLOCK + 1, dtype=np.uint64))


def test_each_rank_has_half_of_a_block() -> None:
    book, caches = ranks()
    for rank, cache in enumerate(caches):
        cache.write(0, SLOTS, content(book))
        assert list(cache.tensors[0].shape) == [4, 1, BLOCK // 2, book.width]
        assert np.array_equal(cache.tensors[0][2, 0].numpy(), content(book).rows[rank::2, 0, 0])
        assert not cache.tensors[0][[0, 1, 3]].any() and not cache.tensors[1].any()


def test_what_another_rank_holds_is_never_wrong() -> None:
    book, caches = ranks()
    wanted = content(book)
    caches[1].write(0, SLOTS, wanted)
    assert caches[1].mismatches(0, SLOTS, wanted).tolist() == []
    caches[1].tensors[0][2, 0, 1] = 0  # the fourth token
    assert caches[1].mismatches(0, SLOTS, wanted).tolist() == [3]
    assert caches[0].mismatches(0, SLOTS, wanted).tolist() == [0, 2, 4, 6]  # it was given nothing


def test_foreign_writes_are_found_by_the_schedulers_slots() -> None:
    _, caches = ranks()
    for rank, cache in enumerate(caches):
        cache.tensors[1][2, 0, 3] = 5
        assert foreign(cache) == [[], [2 * BLOCK + 6 + rank]]
        assert foreign(cache) == [[], []]


def test_the_model_runner_counts_its_own_slots() -> None:
    """As vLLM's block table maps positions with an interleave of one.

    The slot is -1 where the token belongs to another rank.
    """
    _, caches = ranks()
    assert caches[0].mapping(SLOTS, caches[0].groups[0]).tolist() == [8, -1, 9, -1, 10, -1, 11, -1]
    assert caches[1].mapping(SLOTS, caches[1].groups[0]).tolist() == [-1, 8, -1, 9, -1, 10, -1, 11]


def test_two_tokens_in_a_row() -> None:
    """As vLLM's block table maps positions with an interleave of two."""
    book = CodeBook(layers=2, heads=2, head_dim=16)
    groups = [Group("latent", (0, 1), BLOCK, 1)]
    expected = [[8, 9, -1, -1, 10, 11, -1, -1], [-1, -1, 8, 9, -1, -1, 10, 11]]
    for rank in range(2):
        cache = SlicedCache(book, 4, BLOCK, Slice(rank, 2, 2), groups=groups)
        assert cache.mapping(SLOTS, groups[0]).tolist() == expected[rank]
        cache.write(0, SLOTS, content(book))
        own = [0, 1, 4, 5] if rank == 0 else [2, 3, 6, 7]
        assert np.array_equal(cache.tensors[0][2, 0].numpy(), content(book).rows[own, 0, 0])
        cache.tensors[0][2, 0, 3] = 0  # the last of its tokens
        assert cache.mismatches(0, SLOTS, content(book)).tolist() == own[3:]
        assert foreign(cache) == [[2 * BLOCK + own[3]], []]
    with pytest.raises(ValueError, match="cannot be split"):
        SlicedCache(book, 4, 6, Slice(0, 2, 2))


def test_a_block_that_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="blocks of 7 tokens cannot be split over 2 ranks"):
        SlicedCache(CodeBook(layers=2, heads=2, head_dim=16), 4, 7, Slice(0, 2))
