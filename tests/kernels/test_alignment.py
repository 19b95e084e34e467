# SPDX-License-Identifier: Apache-2.0
"""Tests of kernels on layers that are any number of elements apart.

The widest access that the first layer permits need not be possible in the others.
"""

from __future__ import annotations

import pytest
import torch

from drawn import BACKENDS, DTYPES, ids, index
from kvconform.kernels.digest import digest
from kvconform.kernels.paged import BITS, Paged
from kvconform.kernels.poison import poison
from kvconform.kernels.transfer import gather, scatter
from kvconform.kernels.verify import verify
from kvconform.kernels.wide import wider
from kvconform.kernels.write import write

SHAPE = (2, 1, 2, 32)
LENGTH = 128
NUMBERS = [3, 0, 5]
ORDERS = ["equal distances", "first in the middle"]
AWAY = pytest.mark.parametrize("away", [0, 1, 2, 3, 4, 8])
OF_ANY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
IN_ANY_ORDER = pytest.mark.parametrize("order", ORDERS)


def layers_in(flat: torch.Tensor, order: str, away: int) -> list[torch.Tensor]:
    """Return three layers of packed layout in one buffer.

    All but the first are `away` elements, or twice that, off a multiple of 16 elements.
    """
    begins = (
        [0, LENGTH + away, 2 * (LENGTH + away)]
        if order == ORDERS[0]
        else [LENGTH + 16, away, 2 * LENGTH + 32 + away]
    )
    return [flat[begin : begin + LENGTH].view(SHAPE) for begin in begins]


def noise(dtype: torch.dtype, device: str) -> torch.Tensor:
    """A buffer for `layers_in`, with guards behind it."""
    count = (3 * LENGTH + 64) * dtype.itemsize
    return (
        torch.randint(
            0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7)
        )
        .to(device)
        .view(dtype)
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.itemsize])


@BACKENDS
@AWAY
@OF_ANY_DTYPE
@IN_ANY_ORDER
def test_digest_reads_every_layer_where_it_is(
    order: str, dtype: torch.dtype, away: int, where: tuple[str, str]
) -> None:
    """The digest is that of each layer alone in its own memory.

    Changed bits at both ends of all layers show there and nowhere else.
    """
    device, backend = where
    flat = noise(dtype, device)
    layers = layers_in(flat, order, away)
    paged = Paged(layers, "LBHNC")
    before = digest(paged, backend=backend)
    alone = [digest(Paged([layer.clone()], "LBHNC"), backend="torch") for layer in layers]
    assert torch.equal(before, torch.cat(alone, dim=1))
    for layer in layers:
        bits(layer.view(-1))[0] ^= 1
        bits(layer.view(-1))[-1] ^= 1
    changed = (digest(paged, backend=backend) != before).nonzero().tolist()
    assert changed == [
        [block, place, side] for block, side in ((0, 0), (1, 1)) for place in range(3)
    ]


@BACKENDS
@AWAY
@OF_ANY_DTYPE
@IN_ANY_ORDER
def test_slots_of_every_layer_are_where_it_is(
    order: str, dtype: torch.dtype, away: int, where: tuple[str, str]
) -> None:
    """The kernels do to all layers what torch does to each alone, and touch nothing in between."""
    device, backend = where
    flat, expected = noise(dtype, device), noise(dtype, device)
    paged = Paged(layers_in(flat, order, away), "LBHNC", NUMBERS)
    alone = [
        Paged([layer], "LBHNC", [n])
        for layer, n in zip(layers_in(expected, order, away), NUMBERS, strict=True)
    ]
    slots, content = index([3, 0, 2], device), ids([11, 12, 2**64 - 1], device)
    write(paged, slots, content, 3, backend)
    for one in alone:
        write(one, slots, content, 3, "torch")
    assert torch.equal(bits(flat), bits(expected))
    assert verify(paged, slots, content, backend).holds()
    rows = gather(paged, slots, backend=backend)
    assert torch.equal(
        bits(rows), bits(torch.cat([gather(one, slots, backend="torch") for one in alone]))
    )
    scatter(paged, slots.flip(0), rows, backend)
    poison(paged, index([1], device), content[:1], 9, backend)
    for layer, one in enumerate(alone):
        scatter(one, slots.flip(0), rows[layer : layer + 1], "torch")
        poison(one, index([1], device), content[:1], 9, "torch")
    assert torch.equal(bits(flat), bits(expected))


@AWAY
@OF_ANY_DTYPE
@IN_ANY_ORDER
def test_what_a_launch_promises_of_its_distances_is_true(
    order: str, dtype: torch.dtype, away: int
) -> None:
    """The compiled kernels rely on it, which no interpreter shows.

    Digests read words as wide as all layers permit, and no wider.
    """
    layers = layers_in(noise(dtype, "cpu"), order, away)
    (launch,) = Paged(layers, "LBHNC").launches
    distances = [(layer.data_ptr() - layers[0].data_ptr()) // dtype.itemsize for layer in layers]
    assert launch.where[:, 0].tolist() == distances
    assert launch.align == (away & -away or 16) and all(
        distance % launch.align == 0 for distance in distances
    )
    assert launch.words.bits.element_size() == min(8, launch.align * dtype.itemsize)


def test_memory_is_not_viewed_as_wider_than_its_address_permits() -> None:
    buffer = bytearray(2048)
    shift = -torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() % 16
    for off, widest in ((0, 16), (8, 8), (4, 4), (2, 2), (1, 1)):
        rows = torch.frombuffer(buffer, dtype=torch.uint8, offset=shift + off, count=1024).view(
            16, 64
        )
        assert wider(rows)[0].element_size() == widest
