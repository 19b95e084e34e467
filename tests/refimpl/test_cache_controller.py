# SPDX-License-Identifier: Apache-2.0
"""Tests of what an operator may ask of the levels of a cache."""

from __future__ import annotations

import pytest
import torch

from kvconform.refimpl.cache.chunks import VALUES, ChunkStore, chunk_of
from kvconform.refimpl.cache.codecs import CODECS, CodecError, Compressible, compressed
from kvconform.refimpl.cache.controller import Controller
from kvconform.refimpl.cache.holds import Holds
from kvconform.refimpl.cache.memory import MemoryBackend
from kvconform.refimpl.cache.tiers import Level, Tiers

LAYER = torch.linspace(-3.0, 5.0, 4 * 8 * 16).view(4, 128)
"""Four tokens of 128 numbers each."""


class Cache:
    """Two levels, of two and of `bound` values, with the chunks a to d."""

    def __init__(self, bound: int | None = None) -> None:
        self.holds = Holds()
        levels = [Level("host", MemoryBackend(), 2), Level("disk", MemoryBackend(), bound)]
        self.tiers = Tiers(levels, lambda key: chunk_of(key) in self.holds, VALUES)
        self.store = ChunkStore(self.tiers)
        self.controller = Controller(self.tiers, self.holds, CODECS["int8"])
        self.codec = Compressible()
        for key in "abcd":
            self.put(key)

    def put(self, key: str) -> None:
        data = LAYER.view(torch.uint8).numpy().tobytes()
        self.store.put(0, key, "l0", self.codec.encode(data, LAYER.dtype, 4))
        self.store.commit(0, key)

    def chunks(self, keys: str) -> list[list[str]]:
        return [self.store.names(key) for key in keys]

    def at(self, keys: str = "abcd") -> dict[str, int]:
        return self.controller.at(self.chunks(keys))


def test_it_finds_what_is_there_from_the_start_on() -> None:
    cache = Cache()
    assert cache.controller.found(cache.chunks("abxcd")) == 2
    assert cache.at() == {"host": 2, "disk": 2} and cache.at("cd") == {"host": 2, "disk": 0}


def test_what_is_cleared_is_gone_from_all_levels_and_nothing_else() -> None:
    cache = Cache()
    assert cache.store.read("a")  # now it is at both levels
    cache.controller.pin(cache.chunks("a"))
    cache.controller.clear(cache.chunks("a"))
    assert not cache.store.has("a") and cache.at("a") == {"host": 0, "disk": 0}
    assert [*cache.store.keys()] == ["b", "c", "d"] and len(cache.holds) == 0


def test_what_is_moved_is_there_whole_and_nowhere_else() -> None:
    cache = Cache()
    before = cache.store.read("d")
    cache.controller.move(cache.chunks("cdx"), "disk")
    assert cache.at("cd") == {"host": 0, "disk": 2}
    cache.controller.move(cache.chunks("a"), "host")
    assert cache.at("a") == {"host": 1, "disk": 0}
    cache.controller.move(cache.chunks("bcd"), "host")
    assert cache.at() == {"host": 2, "disk": 2}
    assert cache.store.read("d") == before and [*cache.store.keys()] == ["a", "b", "c", "d"]


def test_the_last_chunks_stay_if_a_level_is_too_small_for_a_move() -> None:
    cache = Cache()
    cache.controller.move(cache.chunks("abcd"), "host")
    assert cache.at("ab") == {"host": 2, "disk": 0} and cache.at("cd") == {"host": 0, "disk": 2}
    assert len(cache.holds) == 0


def test_nothing_pinned_has_to_leave_for_a_move() -> None:
    cache = Cache()
    cache.controller.pin(cache.chunks("cd"))
    cache.controller.move(cache.chunks("a"), "host")
    assert cache.at("a") == {"host": 0, "disk": 1} and cache.at("cd")["host"] == 2


def test_what_is_pinned_stays_until_it_is_unpinned() -> None:
    cache = Cache(bound=2)
    cache.controller.pin(cache.chunks("abx"))
    cache.controller.pin(cache.chunks("a"))
    assert len(cache.holds) == 2
    for number in range(9):
        cache.put(f"more{number}")
    assert cache.store.has("a") and cache.store.has("b") and not cache.store.has("c")
    cache.controller.unpin(cache.chunks("ab"))
    cache.controller.unpin(cache.chunks("ab"))
    assert len(cache.holds) == 0
    for number in range(9):
        cache.put(f"still-more{number}")
    assert not cache.store.has("a")


def test_all_pins_can_be_released() -> None:
    cache = Cache()
    cache.controller.pin(cache.chunks("ab"))
    cache.controller.unpin_all()
    cache.controller.unpin_all()
    assert len(cache.holds) == 0


def test_what_is_compressed_is_smaller_and_within_its_tolerance() -> None:
    cache = Cache()
    whole = len(cache.store.read("a")["l0"])
    cache.controller.compress(cache.chunks("ax"))
    cache.controller.compress(cache.chunks("a"))
    cache.store.discard()  # it remembers what it read last
    stored = cache.store.read("a")["l0"]
    assert len(stored) < whole and len(cache.store.read("b")["l0"]) == whole
    decoded = cache.codec.decode(stored, LAYER.dtype)
    off = (torch.frombuffer(bytearray(decoded), dtype=LAYER.dtype).view(4, -1) - LAYER).abs().max()
    assert 0 < off <= CODECS["int8"].tolerance * LAYER.abs().max()
    assert cache.at("a") == {"host": 1, "disk": 1}
    for level in cache.tiers.levels:
        assert level.get(cache.store.names("a")[0]) == cache.tiers.get(cache.store.names("a")[0])


def test_what_is_no_floating_point_number_stays_as_it_is() -> None:
    numbers = Compressible().encode(b"abcd", torch.uint8, 4)
    assert compressed(numbers, CODECS["int8"]) == numbers
    assert Compressible().decode(numbers, torch.uint8) == b"abcd"
    with pytest.raises(CodecError, match="header"):
        compressed(b"abcd", CODECS["int8"])


def test_what_is_compressed_stays_where_it_is() -> None:
    cache = Cache()
    cache.controller.compress(cache.chunks("abcd"))
    assert cache.at("ab") == {"host": 0, "disk": 2} and cache.at("cd") == {"host": 2, "disk": 0}
    assert [level.counts.promoted for level in cache.tiers.levels] == [0, 0]
