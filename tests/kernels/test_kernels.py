# SPDX-License-Identifier: Apache-2.0
"""Tests of every implementation of every kernel against numpy, bit for bit.

Layouts, strides, dtypes and slot mappings are drawn.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawn import BACKENDS, EXAMPLES, FEW, Drawn, Shape, contents, ids, index, mappings, shapes
from kvconform.kernels import blocks
from kvconform.kernels.codes import CodeBook, mix64
from kvconform.kernels.device import Cut
from kvconform.kernels.digest import digest
from kvconform.kernels.layout import Layout, every
from kvconform.kernels.paged import BITS, Paged
from kvconform.kernels.poison import poison
from kvconform.kernels.transfer import gather, scatter
from kvconform.kernels.verify import Mismatch, verify, verify_torch
from kvconform.kernels.write import write

NONCES = st.sampled_from([0, 1, 0x4321, 0xFFFF])


def same(have: list[np.ndarray], want: list[np.ndarray]) -> None:
    for mine, other in zip(have, want, strict=True):
        assert np.array_equal(mine, other), (
            f"{(mine != other).sum()} of {mine.size} elements differ"
        )


@BACKENDS
@EXAMPLES
@given(st.data())
def test_write_fills_the_slots_and_nothing_else(
    where: tuple[str, str], data: st.DataObject
) -> None:
    shape = data.draw(shapes())
    slots, nonce = data.draw(mappings(shape)), data.draw(NONCES)
    content = data.draw(contents(len(slots)))
    cache = shape.make(where[0])
    want = cache.memory()
    cache.put(want, slots, cache.codes(content, nonce))
    write(cache.paged, index(slots, where[0]), ids(content, where[0]), nonce, where[1])
    same(cache.memory(), want)


@BACKENDS
@EXAMPLES
@given(st.data())
def test_verify_finds_every_element_that_differs(
    where: tuple[str, str], data: st.DataObject
) -> None:
    shape = data.draw(shapes())
    slots = data.draw(mappings(shape, unique=False))
    per_slot = data.draw(contents(shape.slots))
    content = [per_slot[slot] if slot >= 0 else 5 for slot in slots]
    cache = shape.make(where[0])
    memory = cache.memory()
    cache.put(memory, list(range(shape.slots)), cache.codes(per_slot, data.draw(NONCES)))
    for _ in range(data.draw(st.integers(0, 4))):  # one bit each, anywhere in the memory
        buffer = memory[data.draw(st.integers(0, len(memory) - 1))]
        place = data.draw(st.integers(0, buffer.size - 1))
        buffer[place] ^= buffer.dtype.type(1 << data.draw(st.integers(0, 8 * buffer.itemsize - 2)))
    cache.load(memory)
    differs = cache.take(memory, slots) != cache.codes(content, 0)
    differs &= CodeBook(1, 1, shape.dim).content_mask()[: shape.dim]
    differs[[slot < 0 for slot in slots]] = False
    given_slots, given_content = index(slots, where[0]), ids(content, where[0])
    verdict = verify(cache.paged, given_slots, given_content, where[1])
    assert int(verdict.count) == differs.sum()
    assert verdict.wrong.tolist() == differs.sum((1, 2, 3, 4)).tolist()
    places = np.argwhere(differs)
    assert verdict.first() == (Mismatch(*places[0].tolist()) if len(places) else None)
    assert verdict.holds() is (not len(places))
    if where == ("cpu", "torch"):  # the definition, without the short cuts
        found = torch.zeros_like(verdict.found)
        verify_torch(cache.paged, given_slots, given_content, found, quick=False)
        assert torch.equal(found, verdict.found)
    same(cache.memory(), memory)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [16, 18, 40])
def test_verify_compares_every_lane_but_the_nonce(
    dim: int, dtype: torch.dtype, where: tuple[str, str]
) -> None:
    """In slot `i`, lane `i` of V of the second head is wrong."""
    cache = Shape(
        layout="kv-first",
        dtype=dtype,
        layers=1,
        blocks=dim // 2,
        heads=2,
        size=2,
        dim=dim,
        numbers=(3,),
    ).make(where[0])
    slots, content = index(list(range(dim)), where[0]), ids(list(range(dim)), where[0])
    write(cache.paged, slots, content, 7, where[1])
    memory = cache.memory()
    for lane in range(dim):
        memory[0][cache.at(0, lane)[1, 1, lane]] ^= 1
    cache.load(memory)
    verdict = verify(cache.paged, slots, content, where[1])
    assert verdict.wrong.tolist() == [0 if 12 <= lane < 16 else 1 for lane in range(dim)]
    assert int(verdict.count) == dim - 4 and verdict.first() == Mismatch(0, 0, 1, 1, 0)


@pytest.mark.parametrize("layout", every())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_whole_blocks_of_every_layout_are_compared_where_they_lie(
    layout: str, dtype: torch.dtype
) -> None:
    """The fast path is taken even where an axis of one element has a meaningless stride.

    The slow path would find the same, at a tenth of the speed.
    """
    paged = Paged(
        Layout.named(layout).allocate(2, 3, 1 if layout.startswith("mla") else 2, 4, 64, dtype),
        layout,
    )
    assert all(blocks.widened(stack) for stack in paged.stacks)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "kv-first", "mla"])
@pytest.mark.parametrize("piece", [1, 20000, 1 << 20])
def test_blocks_are_shared_out_to_threads(
    layout: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However blocks are cut into parts and pieces, the verdict is that of single slots."""
    for name, value in (("THREADED", 0), ("PIECE", piece), ("LARGE", piece), ("BATCH", 64)):
        monkeypatch.setattr(blocks, name, value)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        heads = 1 if layout == "mla" else 2
        cache = Shape(
            layout=layout,
            dtype=torch.bfloat16,
            layers=3,
            blocks=11,
            heads=heads,
            size=4,
            dim=32,
            numbers=(3, 5, 4),
            apart=(False, True, False),
        ).make("cpu")
        slots = [block * 4 + place for block in (7, 2, 9, 0, 1, 10, 4) for place in range(4)] + [
            -1,
            13,
            12,
            22,
        ]
        content = list(range(len(slots)))
        write(cache.paged, index(slots, "cpu"), ids(content, "cpu"))
        assert verify(cache.paged, index(slots, "cpu"), ids(content, "cpu")).holds()
        for slot, lane in ((2 * 4 + 1, 5), (10 * 4 + 3, 31), (12, 0)):
            cache.buffers[0][int(cache.at(2, slot)[-1, -1, lane])] ^= 1
        cache.buffers[0][int(cache.at(0, 4 * 4)[0, 0, 13])] ^= 1  # a nonce
        verdict = verify(cache.paged, index(slots, "cpu"), ids(content, "cpu"))
        assert {slots[item]: int(count) for item, count in enumerate(verdict.wrong) if count} == {
            9: 1,
            43: 1,
            12: 1,
        }
        assert verdict.first() == Mismatch(5, 2, heads - 1, cache.paged.sides - 1, 5)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@BACKENDS
@EXAMPLES
@given(st.data())
def test_gather_takes_the_rows_and_changes_nothing(
    where: tuple[str, str], data: st.DataObject
) -> None:
    shape = data.draw(shapes())
    slots = data.draw(mappings(shape, unique=False))
    cache = shape.make(where[0])
    memory = cache.memory()
    rows = gather(cache.paged, index(slots, where[0]), backend=where[1])
    assert rows.dtype == shape.dtype and rows.is_contiguous()
    bits = rows.view(BITS[rows.itemsize]).cpu().numpy()
    assert np.array_equal(bits, cache.take(memory, slots).swapaxes(0, 1))
    same(cache.memory(), memory)


@BACKENDS
@EXAMPLES
@given(st.data())
def test_scatter_fills_the_slots_and_nothing_else(
    where: tuple[str, str], data: st.DataObject
) -> None:
    shape = data.draw(shapes())
    slots = data.draw(mappings(shape))
    cache = shape.make(where[0])
    paged, want = cache.paged, cache.memory()
    noise = np.random.default_rng(1).integers(
        0, 256, shape.layers * len(slots) * paged.slot_bytes, dtype=np.uint8
    )
    bits = noise.view(cache.memory()[0].dtype).reshape(
        shape.layers, len(slots), shape.heads, paged.sides, shape.dim
    )
    cache.put(want, slots, bits.swapaxes(0, 1))
    scatter(
        paged,
        index(slots, where[0]),
        torch.from_numpy(bits).to(where[0]).view(shape.dtype),
        where[1],
    )
    same(cache.memory(), want)


@BACKENDS
@EXAMPLES
@given(st.data())
def test_poison_fills_whole_blocks_and_nothing_else(
    where: tuple[str, str], data: st.DataObject
) -> None:
    shape = data.draw(shapes())
    chosen = data.draw(st.lists(st.integers(0, shape.blocks - 1), unique=True))
    chosen.insert(data.draw(st.integers(0, len(chosen))), -1)
    content, nonce = data.draw(contents(len(chosen))), data.draw(NONCES)
    cache = shape.make(where[0])
    want = cache.memory()
    codes = cache.codes(content, nonce)
    for item, block in enumerate(chosen):
        for place in range(shape.size if block >= 0 else 0):
            cache.put(want, [block * shape.size + place], codes[item : item + 1])
    poison(cache.paged, index(chosen, where[0]), ids(content, where[0]), nonce, where[1])
    same(cache.memory(), want)


def digest_of(cache: Drawn, memory: list[np.ndarray], layer: int, block: int, side: int) -> int:
    """The digest by its definition, with Python's integers."""
    total, number = 0, 0
    for head in cache.maps[layer][block]:
        for slot in head:
            row = memory[cache.of_layer[layer]][slot[side]].tobytes()
            for begin in range(0, len(row), 8):
                number += 1
                total += int.from_bytes(row[begin : begin + 8].ljust(8, b"\0"), "little") * (
                    mix64(number) | 1
                )
    return mix64(total)


@BACKENDS
@FEW
@given(st.data())
def test_digest_is_as_defined(where: tuple[str, str], data: st.DataObject) -> None:
    shape = data.draw(shapes().filter(lambda shape: shape.size * shape.dim * shape.heads <= 1600))
    cache = shape.make(where[0])
    memory = cache.memory()
    chosen = data.draw(st.lists(st.integers(-1, shape.blocks - 1), max_size=4))
    have = digest(cache.paged, index(chosen, where[0]), where[1]).cpu().numpy().view(np.uint64)
    sides = cache.paged.sides
    want = [
        [
            [
                digest_of(cache, memory, layer, block, side) if block >= 0 else 0
                for side in range(sides)
            ]
            for layer in range(shape.layers)
        ]
        for block in chosen
    ]
    assert have.shape == (len(chosen), shape.layers, sides)
    assert have.tolist() == want
    assert torch.equal(
        digest(cache.paged, backend=where[1]),
        digest(cache.paged, index(list(range(shape.blocks)), where[0]), where[1]),
    )
    same(cache.memory(), memory)


@BACKENDS
@pytest.mark.parametrize(
    "apart, last", [((1 << 31) + 64, 1), ((1 << 30) + 64, 5)], ids=["stride", "product"]
)
def test_a_cache_of_more_than_2_31_elements(apart: int, last: int, where: tuple[str, str]) -> None:
    """A stride, or a block times its stride, exceeds 32 bits; most memory is never touched."""
    device, backend = where
    flat = torch.empty(last * apart + 2 * 4 * 2 * 16, dtype=torch.uint8, device=device)
    layer = flat.as_strided((last + 1, 2, 4, 32), (apart, 128, 32, 1))
    paged = Paged([layer], "LBHNC")
    begin = 4 * last
    slots, content = index([begin + 2, 1], device), ids([77, 88], device)
    write(paged, slots, content, 3, backend)
    want = torch.from_numpy(CodeBook(1, 2, 16).rows(np.array([77, 88], dtype=np.uint64), 3)).view(
        2, 2, 2, 16
    )
    assert torch.equal(layer[last, :, 2].view(2, 2, 16).cpu(), want[0])
    assert torch.equal(
        flat[last * apart + 2 * 32 : last * apart + 3 * 32].cpu(), want[0, 0].flatten()
    )
    assert verify(paged, slots, content, backend).holds()
    rows = gather(paged, slots, backend=backend)
    assert torch.equal(rows[0].cpu(), want)
    scatter(paged, index([begin + 3, -1], device), rows, backend)
    assert torch.equal(layer[last, :, 3].view(2, 2, 16).cpu(), want[0])
    poison(paged, index([last], device), ids([99], device), 0, backend)
    assert (
        digest(paged, index([last], device), backend).tolist()
        == digest(paged, index([last], device), "torch").tolist()
    )
    assert verify(
        paged, index(list(range(begin, begin + 4)), device), ids([99] * 4, device), backend
    ).holds()


@BACKENDS
@FEW
@given(st.data())
def test_the_digest_does_not_depend_on_the_layout(
    where: tuple[str, str], data: st.DataObject
) -> None:
    dim = data.draw(st.sampled_from([16, 18, 33]))
    names = data.draw(
        st.lists(
            st.sampled_from([name for name in every() if "mla" not in name]), min_size=2, max_size=2
        )
    )
    found = []
    for seed, name in enumerate(names):
        cache = Shape(
            layout=name,
            dtype=torch.bfloat16,
            layers=2,
            blocks=3,
            heads=2,
            size=3,
            dim=dim,
            numbers=(0, 1),
        ).make(where[0], seed)
        write(
            cache.paged, index(list(range(9)), where[0]), ids(list(range(9)), where[0]), 9, where[1]
        )
        found.append(digest(cache.paged, backend=where[1]).tolist())
    assert found[0] == found[1]


@BACKENDS
def test_layers_at_unequal_distances_in_one_buffer(where: tuple[str, str]) -> None:
    device, backend = where
    tensors = Layout.named("LBHNC").allocate(7, 2, 1, 4, 16, torch.bfloat16, device)
    chosen = [0, 1, 3, 6, 5]
    slots, content = index([3, 6], device), ids([11, 12], device)
    write(
        Paged([tensors[place] for place in chosen], "LBHNC", [place + 20 for place in chosen]),
        slots,
        content,
        0,
        backend,
    )
    for place, tensor in enumerate(tensors):
        if place in chosen:
            assert verify(Paged([tensor], "LBHNC", [place + 20]), slots, content, "torch").holds()
            assert int((tensor != 0).flatten(2).any(2).sum()) == 2
        else:
            assert not tensor.any()
    rows = gather(Paged([tensors[place] for place in chosen], "LBHNC"), slots, backend=backend)
    assert torch.equal(rows[3].flatten(1), torch.stack([tensors[6][0, 0, 3], tensors[6][1, 0, 2]]))


@BACKENDS
def test_layers_of_several_launches(where: tuple[str, str]) -> None:
    """Layers of different strides are launched apart, and count on from one launch to the next."""
    device, backend = where
    dtype, numbers = torch.bfloat16, [4, 0, 7, 2]

    def mixed() -> list[torch.Tensor]:
        first, second = (
            Layout.named(name).allocate(2, 3, 2, 4, 16, dtype, device)
            for name in ("LBHNC", "LBNHC")
        )
        return [first[0], second[0], second[1], first[1]]

    tensors, slots = mixed(), index([3, 9, -1, 5], device)
    content = ids([1, 2, 3, 4], device)
    paged = Paged(tensors, "LBHNC", numbers)
    assert [(launch.start, launch.layers) for launch in paged.launches] == [(0, 1), (1, 2), (3, 1)]
    write(paged, slots, content, 3, backend)
    for number, tensor in zip(numbers, tensors, strict=True):
        assert verify(Paged([tensor], "LBHNC", [number]), slots, content, "torch").holds()
    rows = gather(paged, slots, backend=backend)
    assert torch.equal(rows, gather(paged, slots, backend="torch"))
    assert torch.equal(digest(paged, backend=backend), digest(paged, backend="torch"))
    others = mixed()
    scatter(Paged(others, "LBHNC", numbers), slots, rows, backend)
    for one, other in zip(tensors, others, strict=True):
        assert torch.equal(one, other)
    tensors[2].view(torch.int16)[2, 1, 1, 7] ^= 1
    found = verify(paged, slots, content, backend)
    assert found.first() == Mismatch(1, 2, 1, 0, 7)


@BACKENDS
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 576), (torch.bfloat16, 1040)])
def test_rows_that_are_copied_in_several_parts(
    where: tuple[str, str], dtype: torch.dtype, dim: int
) -> None:
    device, backend = where
    assert Cut.of(3, dim, dtype.itemsize, copied=True).chunks > 1
    tensors = Layout.named("mla").allocate(2, 2, 1, 4, dim, dtype, device)
    for tensor in tensors:
        tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(5)))
    slots = index([6, -1, 1], device)
    rows = gather(Paged(tensors, "mla"), slots, backend=backend)
    assert torch.equal(rows, gather(Paged(tensors, "mla"), slots, backend="torch"))
    assert torch.equal(rows[1, 0].flatten(), tensors[1][1, 2].flatten()) and not rows[:, 1].any()
    others = Layout.named("mla").allocate(2, 2, 1, 4, dim, dtype, device)
    scatter(Paged(others, "mla"), slots, rows, backend)
    assert torch.equal(gather(Paged(others, "mla"), slots, backend="torch"), rows)
