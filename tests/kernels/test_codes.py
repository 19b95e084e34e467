# SPDX-License-Identifier: Apache-2.0
"""Tests of the provenance code.

It is exact in every number format and distinct where it must be. Comparison of contents ignores
its nonce.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import drawn
from kvconform.kernels.codes import FINGERPRINT_LANES, MIN_HEAD_DIM, CodeBook, mix64
from kvconform.kernels.paged import Paged
from kvconform.kernels.verify import verify
from kvconform.kernels.write import write

BOOK = CodeBook(3, 2, 16)
WIDE = CodeBook(2, 2, 40)
IDS = st.integers(0, 2**64 - 1)


def rows(book: CodeBook, *content: int, nonce: int = 0) -> np.ndarray:
    return book.rows(np.array(content, dtype=np.uint64), nonce)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "uint8"])
def test_every_value_survives_every_number_format(dtype: str) -> None:
    made = torch.from_numpy(rows(WIDE, *range(1, 200), nonce=0xBEEF))
    assert set(made.unique().tolist()) == set(range(16))
    assert torch.equal(made.to(getattr(torch, dtype)).to(torch.float32), made.to(torch.float32))


@given(st.lists(IDS, min_size=2, max_size=40, unique=True))
def test_content_layer_half_and_head_give_distinct_fingerprints(content: list[int]) -> None:
    prints = BOOK.fingerprints(np.array(content, dtype=np.uint64))
    assert prints.shape == (len(content), 3, 2, 2)
    assert len(np.unique(prints)) == prints.size


@given(IDS, st.integers(0, 0xFFFF), st.integers(0, 0xFFFF))
def test_the_nonce_is_masked_in_content_and_visible_in_bytes(
    content: int, first: int, second: int
) -> None:
    for book in (BOOK, WIDE):
        one, two = rows(book, content, nonce=first), rows(book, content, nonce=second)
        mask = book.content_mask()
        assert np.array_equal(one[..., mask], two[..., mask])
        assert np.array_equal(one, two) == (first == second)


def test_the_mask_leaves_out_the_nonce_lanes_of_both_halves_and_nothing_else() -> None:
    assert np.flatnonzero(~WIDE.content_mask()).tolist() == [12, 13, 14, 15, 52, 53, 54, 55]


@given(IDS, st.integers(0, 2), st.integers(0, 1), st.integers(0, 1))
def test_a_vector_is_read_back_to_its_fingerprint(
    content: int, layer: int, half: int, head: int
) -> None:
    row = rows(BOOK, content)[0, layer, head]
    expected = BOOK.fingerprints(np.array([content], dtype=np.uint64))[0, layer, half, head]
    assert BOOK.read_print(row[half * 16 : half * 16 + 16]) == int(expected)


@pytest.mark.parametrize("value", [16, -1, 0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("lane", [0, FINGERPRINT_LANES - 1])
def test_what_is_no_code_is_not_read(lane: int, value: float) -> None:
    vector = rows(BOOK, 5)[0, 0, 0, :16].astype(np.float64)
    vector[lane] = value
    assert BOOK.read_print(vector) is None


@pytest.mark.parametrize("lane", range(MIN_HEAD_DIM, 40))
def test_lanes_beyond_the_code_repeat_it_and_must_agree(lane: int) -> None:
    vector = rows(WIDE, 5)[0, 0, 0, :40].copy()
    assert WIDE.read_print(vector) is not None
    vector[lane] ^= 1
    assert WIDE.read_print(vector) is None


@pytest.mark.parametrize("lane", range(FINGERPRINT_LANES, MIN_HEAD_DIM))
def test_a_changed_nonce_is_still_the_same_content(lane: int) -> None:
    vector = rows(WIDE, 5)[0, 0, 0, :40].copy()
    before = WIDE.read_print(vector)
    vector[lane] ^= 1
    assert WIDE.read_print(vector) == before


@settings(max_examples=30)
@given(st.lists(IDS, min_size=1, max_size=20))
def test_the_array_form_mixes_as_the_scalar_one_does(content: list[int]) -> None:
    prints = BOOK.fingerprints(np.array(content, dtype=np.uint64))
    keys = [
        [[mix64(1 + (layer * 2 + kv) * 4096 + head) for head in range(2)] for kv in range(2)]
        for layer in range(3)
    ]
    for index, value in enumerate(content):
        for layer, kv, head in np.ndindex(3, 2, 2):
            assert int(prints[index, layer, kv, head]) == mix64(value ^ keys[layer][kv][head]) & (
                2**48 - 1
            )


def test_the_code_is_frozen() -> None:
    """Golden values: splitmix64's first output for seed 0, and one row.

    The code must be the same on every machine.
    """
    assert mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert rows(BOOK, 0x1234, nonce=0xABCD)[0, 1, 1, :16].tolist() == GOLDEN


GOLDEN = [5, 9, 3, 0, 9, 4, 6, 0, 12, 12, 15, 10, 13, 12, 11, 10]


def test_a_head_must_hold_code_and_nonce() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        CodeBook(1, 1, 15)


@drawn.BACKENDS
def test_a_cache_of_some_heads_holds_their_codes(where: tuple[str, str]) -> None:
    device, backend = where
    content = np.array([1, 2**63 + 5], dtype=np.uint64)
    whole = CodeBook(3, 8, 16).rows(content)[:, 2, 5:7].reshape(2, 2, 2, 16)
    layer = torch.zeros(2, 2, 4, 32, dtype=torch.uint8, device=device)
    paged = Paged([layer], "LBHNC", [2], first_head=5)
    slots, wanted = drawn.index([6, 1], device), drawn.ids(content.tolist(), device)
    write(paged, slots, wanted, backend=backend)
    there = layer.cpu().unflatten(3, (2, 16))
    assert np.array_equal(there[[1, 0], :, [2, 1]].numpy(), whole)
    assert verify(paged, slots, wanted, backend).holds()
    other = Paged([layer], "LBHNC", [2], first_head=4)
    assert not verify(other, slots, wanted, backend).holds()
    with pytest.raises(ValueError, match="fewer than 4096 heads, not 4097"):
        Paged([layer], "LBHNC", first_head=4095)
