# SPDX-License-Identifier: Apache-2.0
"""Tests of the reference connector's parts: keys, ranges, paged tensors, stores."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.request import Request

from kvconform.refimpl.cache.chunks import EPOCH, VALUES, ChunkStore, open_store
from kvconform.refimpl.cache.memory import MemoryBackend
from kvconform.refimpl.delay import Countdown
from kvconform.refimpl.keys import extend_keys
from kvconform.refimpl.paging import read_slots, slots_of, write_slots
from kvconform.refimpl.plan import cut

BLOCK = 4


def request_of(tokens: list[int], req_id: str = "a", **identity: Any) -> Request:
    features = identity.pop("mm", None)
    return Request(
        req_id, tokens, SamplingParams(max_tokens=8), None, mm_features=features, **identity
    )


def image(identifier: str, offset: int, length: int = 2) -> Any:
    return SimpleNamespace(
        identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def lora(name: str, path: str, number: int = 1) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=number)


# ---- Keys ----


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=24),
    st.lists(st.integers(0, 9), min_size=1, max_size=24),
    st.integers(1, 6),
)
def test_two_requests_share_the_keys_of_their_common_whole_chunks(
    one: list[int], two: list[int], chunk: int
) -> None:
    keys = [
        extend_keys([], b"root", request_of(tokens), chunk, len(tokens)) for tokens in (one, two)
    ]
    common = next(
        (i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y),
        min(len(one), len(two)),
    )
    shared = [x == y for x, y in zip(*keys, strict=False)]
    assert shared == [index < common // chunk for index in range(len(shared))]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.integers(1, 7), st.data())
def test_extending_the_chain_in_steps_gives_the_same_keys(
    tokens: list[int], chunk: int, data: st.DataObject
) -> None:
    request, steps = (
        request_of(tokens),
        sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4))),
    )
    keys: list[str] = []
    for end in [*steps, len(tokens)]:
        extend_keys(keys, b"root", request, chunk, end)
    assert keys == extend_keys([], b"root", request, chunk, len(tokens))


IDENTITIES: list[dict[str, Any]] = [
    {},
    {"cache_salt": "tenant"},
    {"lora_request": lora("x", "/one")},
    {"lora_request": lora("y", "/one")},
    {"lora_request": lora("x", "/two")},
    {"mm": [image("cat", 0)]},
    {"mm": [image("dog", 0)]},
    {"mm": [image("cat", 1)]},
    {"cache_salt": "x", "lora_request": lora("x", "/one")},
]


def test_every_part_of_an_identity_changes_the_keys() -> None:
    keys = {
        extend_keys([], b"root", request_of([1, 2, 3, 4], **identity), 4, 4)[0]
        for identity in IDENTITIES
    }
    assert len(keys) == len(IDENTITIES)


def test_what_is_no_identity_does_not_change_the_keys() -> None:
    one = request_of([1, 2, 3, 4], "a", lora_request=lora("x", "/one", 1))
    two = request_of([1, 2, 3, 4], "b", lora_request=lora("x", "/one", 2), priority=3)
    assert extend_keys([], b"root", one, 4, 4) == extend_keys([], b"root", two, 4, 4)


def test_a_key_is_the_same_in_every_process() -> None:
    assert extend_keys([], b"root", request_of([1, 2], cache_salt="s"), 2, 2)[0].startswith(
        "f53fde9bda1ff9d7"
    )


# ---- Ranges and paging ----


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 40), st.integers(0, 40))
def test_pieces_tile_the_range_and_respect_chunks(
    chunk: int, block_size: int, start: int, length: int
) -> None:
    end, table = start + length, list(range(100, 200))
    keys = [f"k{index}" for index in range(end // chunk + 1)]
    pieces = cut(keys, table, start, end, chunk, block_size)
    assert [slot for piece in pieces for slot in piece.slots] == list(
        slots_of(table, start, end, block_size)
    )
    position = start
    for piece in pieces:
        assert piece.key == keys[position // chunk]
        assert piece.first == position % chunk
        assert 0 < len(piece.slots) <= chunk - piece.first
        position += len(piece.slots)


def test_tokens_without_a_slot_are_an_error() -> None:
    with pytest.raises(IndexError):
        slots_of([7], 0, 5, BLOCK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_survive_permuted_strides(dtype: torch.dtype) -> None:
    layer = torch.zeros(6, BLOCK, 2, 8, dtype=dtype).permute(0, 2, 1, 3)
    layer[:] = torch.randint(-8, 8, layer.shape).to(dtype)
    copy = torch.zeros_like(layer)
    assert write_slots(copy, [5, 6], read_slots(layer, [9, 10, 11]), 1)
    assert torch.equal(copy[1, :, 1], layer[2, :, 2])
    assert torch.equal(copy[1, :, 2], layer[2, :, 3])
    assert not write_slots(copy, [5, 6], read_slots(layer, [9]), 0)


# ---- Stores ----


@pytest.fixture(params=["memory", "directory"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> list[ChunkStore]:
    url = f"memory:{tmp_path}" if request.param == "memory" else str(tmp_path)
    return [open_store(url, rank, 2) for rank in range(2)]


def test_a_chunk_is_there_when_every_rank_has_committed_it(ranks: list[ChunkStore]) -> None:
    for store in ranks:
        store.put(0, "k", "layer/1", b"data")
        assert not any(other.has("k") for other in ranks)
        assert store.get("k", "layer/1") is None
        store.commit(0, "k")
    assert [store.get("k", "layer/1") for store in ranks] == [b"data", b"data"]
    assert list(ranks[0].keys()) == ["k"]
    ranks[1].drop("k")
    assert not ranks[0].has("k")


def test_a_chunk_without_layers_is_not_stored(ranks: list[ChunkStore]) -> None:
    """So it is for an equal request of the same step, also if the first one's was lost."""
    for store in ranks:
        store.commit(0, "k")
    assert not any(store.has("k") for store in ranks)


def test_a_store_under_way_at_a_reset_never_appears(ranks: list[ChunkStore]) -> None:
    ranks[0].put(0, "k", "layer", b"data")
    ranks[1].reset()
    for store in ranks:
        store.put(0, "k", "layer", b"data")
        store.commit(0, "k")
    assert not ranks[0].has("k")
    assert ranks[0].epoch() == 1


@pytest.mark.parametrize("moment", ["mkdir", "open", "replace"])
def test_a_reset_while_a_file_is_written_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """One thread writes while another empties the store.

    Found by random workloads on the variant `threads`.
    """
    store, other = open_store(str(tmp_path)), open_store(str(tmp_path))
    original, done = getattr(os, moment), []

    def interrupted(path: Any, *args: Any, **kwargs: Any) -> Any:
        if "/chunks" in str(path) and not done:
            done.append(path)
            other.reset()
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, moment, interrupted)
    store.put(0, "k", "layer", b"data")
    store.commit(0, "k")
    assert done
    assert other.epoch() == 1
    assert not other.has("k")
    assert list(other.keys()) == []
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{EPOCH}.kv"]


@pytest.mark.parametrize("commit", ["one", "many"])
def test_what_a_reset_overtakes_leaves_no_value(commit: str) -> None:
    class Overtaken(MemoryBackend):
        def set(self, key: str, value: bytes) -> None:
            if key.startswith(VALUES):
                ChunkStore(self).reset()
            super().set(key, value)

    store = ChunkStore(Overtaken())
    store.put(0, "k", "layer", b"data")
    if commit == "one":
        store.commit(0, "k")
    else:
        store.commit_many(0, ["k"])
    assert [*store.backend.list()] == [EPOCH]


def test_two_saves_of_one_chunk_in_a_step_store_it_whole(ranks: list[ChunkStore]) -> None:
    """Layer by layer, both put their layers before either commits."""
    for store in ranks:
        for layer in ("0", "1"):
            store.put(0, "k", layer, b"layer " + layer.encode())
            store.put(0, "k", layer, b"layer " + layer.encode())
        store.commit(0, "k")
        store.commit(0, "k")
    assert [store.get("k", "1") for store in ranks] == [b"layer 1", b"layer 1"]


def test_what_is_put_and_not_committed_in_a_step_is_dropped(ranks: list[ChunkStore]) -> None:
    for store in ranks:
        store.put(0, "k", "0", b"of an abandoned save")
        store.discard()
        store.put(0, "k", "1", b"layer 1")
        store.commit(0, "k")
    assert ranks[0].get("k", "0") is None and ranks[0].get("k", "1") == b"layer 1"


def test_what_another_thread_has_put_is_not_dropped() -> None:
    store = ChunkStore(MemoryBackend())
    with ThreadPoolExecutor(1) as thread:
        thread.submit(store.put, 0, "k", "layer", b"data").result()
        store.discard()
        thread.submit(store.commit, 0, "k").result()
    assert store.get("k", "layer") == b"data"


def test_what_an_earlier_epoch_still_writes_changes_no_chunk_of_this_one(
    ranks: list[ChunkStore],
) -> None:
    ranks[1].reset()
    for store in ranks:
        store.put(1, "k", "layer", b"new")
        store.commit(1, "k")
        store.put(0, "k", "layer", b"old")
    assert [store.get("k", "layer") for store in ranks] == [b"new", b"new"]


def test_a_countdown_counts_polls() -> None:
    queue: Countdown[str] = Countdown()
    queue.add("now", 0)
    queue.add("later", 2)
    queue.add("never", 1)
    queue.drop(lambda item: item == "never")
    assert [queue.poll(), queue.poll(), queue.poll()] == [["now"], [], ["later"]]
