# SPDX-License-Identifier: Apache-2.0
"""Tests of layouts: the meaning of each element of the registered tensor, written out by hand.

Also covers the layouts that are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvconform.kernels.layout import PACKED, Layout, every

LAYERS, BLOCKS, HEADS, SIZE, DIM = 3, 4, 2, 5, 16
REGISTERED: dict[str, tuple[tuple[int, ...], Callable[[Any, int, int, int, int, int], Any]]] = {
    # shape of a layer's tensor; element of (tensor, block, head, slot, side, element)
    "kv-first": ((2, BLOCKS, SIZE, HEADS, DIM), lambda t, b, h, n, s, d: t[s, b, n, h, d]),
    "kv-first-hnd": ((2, BLOCKS, SIZE, HEADS, DIM), lambda t, b, h, n, s, d: t[s, b, n, h, d]),
    "kv-second": ((BLOCKS, 2, SIZE, HEADS, DIM), lambda t, b, h, n, s, d: t[b, s, n, h, d]),
    "kv-second-hnd": ((BLOCKS, 2, SIZE, HEADS, DIM), lambda t, b, h, n, s, d: t[b, s, n, h, d]),
    "kv-first-heads": ((2, BLOCKS, HEADS, SIZE, DIM), lambda t, b, h, n, s, d: t[s, b, h, n, d]),
    "cross-layer": ((BLOCKS, 2, SIZE, HEADS, DIM), lambda t, b, h, n, s, d: t[b, s, n, h, d]),
    "cross-layer-hnd": ((BLOCKS, 2, SIZE, HEADS, DIM), lambda t, b, h, n, s, d: t[b, s, n, h, d]),
    "mla": ((BLOCKS, SIZE, DIM), lambda t, b, h, n, s, d: t[b, n, d]),
    "mla-packed": ((BLOCKS, 1, SIZE, DIM), lambda t, b, h, n, s, d: t[b, 0, n, d]),
    "mla-cross-layer": ((BLOCKS, SIZE, DIM), lambda t, b, h, n, s, d: t[b, n, d]),
}
PACKED_SHAPE = ((BLOCKS, HEADS, SIZE, 2 * DIM), lambda t, b, h, n, s, d: t[b, h, n, s * DIM + d])


@pytest.mark.parametrize("name", every())
def test_a_view_shows_every_element_where_it_is(name: str) -> None:
    layout = Layout.named(name)
    shape, element = REGISTERED.get(name, PACKED_SHAPE)
    heads = 1 if "mla" in name else HEADS
    tensors = layout.allocate(LAYERS, BLOCKS, heads, SIZE, DIM, torch.int32)
    assert len(tensors) == LAYERS and all(tuple(tensor.shape) == shape for tensor in tensors)
    flat = torch.arange(LAYERS * tensors[0].numel(), dtype=torch.int32)
    numbered = [
        tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        for tensor in tensors
    ]
    for tensor in numbered:
        tensor.copy_(flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    # every place of the allocation belongs to one element
    assert sorted(torch.stack(numbered).flatten().tolist()) == flat.tolist()
    for tensor in numbered:
        view = layout.view(tensor)
        assert tuple(view.shape) == (BLOCKS, heads, SIZE, layout.sides, DIM)
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        for b, h, n, s, d in [
            (0, 0, 0, 0, 0),
            (1, heads - 1, 2, layout.sides - 1, 3),
            (3, 0, 4, layout.sides - 1, 15),
            (2, heads - 1, 0, 0, 7),
        ]:
            assert view[b, h, n, s, d] == element(tensor, b, h, n, s, d)


@pytest.mark.parametrize(
    "name, strides",
    [
        (
            "LBHNC",
            {"L": BLOCKS * HEADS * SIZE * 32, "B": HEADS * SIZE * 32, "H": SIZE * 32, "N": 32},
        ),
        (
            "LBNHC",
            {"L": BLOCKS * HEADS * SIZE * 32, "B": HEADS * SIZE * 32, "N": HEADS * 32, "H": 32},
        ),
        (
            "BLHNC",
            {"B": LAYERS * HEADS * SIZE * 32, "L": HEADS * SIZE * 32, "H": SIZE * 32, "N": 32},
        ),
        (
            "BHLNC",
            {"B": HEADS * LAYERS * SIZE * 32, "H": LAYERS * SIZE * 32, "L": SIZE * 32, "N": 32},
        ),
        (
            "LHBNC",
            {"L": HEADS * BLOCKS * SIZE * 32, "H": BLOCKS * SIZE * 32, "B": SIZE * 32, "N": 32},
        ),
    ],
)
def test_the_name_of_a_packed_layout_is_its_order_in_memory(
    name: str, strides: dict[str, int]
) -> None:
    tensors = Layout.named(name).allocate(LAYERS, BLOCKS, HEADS, SIZE, DIM, torch.uint8)
    assert tensors[0].stride() == (*(strides[axis] for axis in "BHN"), 1)
    assert tensors[1].storage_offset() - tensors[0].storage_offset() == strides["L"]


def test_all_of_vllms_names_are_known() -> None:
    assert set(PACKED) <= set(every())


@pytest.mark.parametrize("name", ["NHD", "LBHN", "lbhnc", ""])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no layout is called"):
        Layout.named(name)


@pytest.mark.parametrize(
    "name, shape, says",
    [
        ("LBHNC", (4, 2, 5, 33), "cannot be halved"),
        ("LBHNC", (4, 2, 5, 2, 16), "has 5"),
        ("kv-first", (3, 4, 5, 2, 16), "is K or V: 2 entries, not 3"),
        ("kv-second", (4, 1, 5, 2, 16), "is K or V: 2 entries, not 1"),
        ("mla", (4, 1, 5, 16), "has 4"),
    ],
)
def test_a_tensor_of_another_layout_is_refused(
    name: str, shape: tuple[int, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Layout.named(name).view(torch.empty(shape))


def test_several_heads_need_an_axis() -> None:
    with pytest.raises(ValueError, match="has one head, not 2"):
        Layout.named("mla").allocate(1, 2, 2, 4, 16, torch.uint8)
