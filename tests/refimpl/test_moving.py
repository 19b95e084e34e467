# SPDX-License-Identifier: Apache-2.0
"""Tests that the streamed connector moves the same rows by indexing and by the kernels.

The kernels run their torch path.
"""

from __future__ import annotations

import pytest
import torch

from kvconform.refimpl.moving import Moving
from kvconform.refimpl.paging import read_slots

SHAPES = {"packed": (7, 2, 4, 32), "kv-first": (2, 7, 4, 2, 16), "kv-second": (7, 2, 4, 2, 16)}
SLOTS = [5, 27, 8, 9]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kernels", [False, True])
def test_rows_out_and_in(shape: tuple[int, ...], kernels: bool) -> None:
    layer = torch.arange(1792, dtype=torch.float32).view(shape)
    moving, slots = Moving(layer, kernels), torch.tensor(SLOTS)
    rows = moving.take(slots)
    assert rows.shape == (4, *moving.row) and rows.numpy().tobytes() == read_slots(layer, SLOTS)
    other = torch.zeros_like(layer)
    Moving(other, kernels).put(slots, rows)
    assert read_slots(other, SLOTS) == read_slots(layer, SLOTS) and int((other != 0).sum()) == int(
        (rows != 0).sum()
    )


def test_a_layer_that_is_not_contiguous() -> None:
    # blocks, layers, heads, slots, values
    pool = torch.arange(2 * 1792, dtype=torch.float32).view(7, 2, 2, 4, 32)
    layer, slots = pool[:, 1], torch.tensor(SLOTS)
    assert torch.equal(Moving(layer, True).take(slots), Moving(layer, False).take(slots))
