# SPDX-License-Identifier: Apache-2.0
"""Tests of the levels of a cache: bounds, promotion, demotion, evictors and holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvconform.refimpl.cache.backend import Full, StoreError
from kvconform.refimpl.cache.eviction import EVICTORS, Lfu, Lru
from kvconform.refimpl.cache.holds import Holds
from kvconform.refimpl.cache.memory import MemoryBackend
from kvconform.refimpl.cache.tiers import Level, Tiers


def tiers(
    *bounds: int | None, stays: Callable[[str], bool] = lambda key: False, evict: str = "lru"
) -> Tiers:
    levels = [
        Level(f"level {number}", MemoryBackend(), bound, EVICTORS[evict]())
        for number, bound in enumerate(bounds)
    ]
    return Tiers(levels, stays)


def contents(cache: Tiers) -> list[list[str]]:
    return [sorted(level.backend.list()) for level in cache.levels]


def filled(cache: Tiers, count: int) -> Tiers:
    for number in range(count):
        cache.set(f"k{number}", b"v%d" % number)
    return cache


# -- moves


def test_what_leaves_a_level_goes_to_the_next_one_and_comes_back() -> None:
    cache = filled(tiers(2, 3, None), 7)
    assert contents(cache) == [["k5", "k6"], ["k2", "k3", "k4"], ["k0", "k1"]]
    assert all(cache.exists(f"k{number}") for number in range(7)) and not cache.exists("k7")
    assert cache.get("k0") == b"v0"
    assert contents(cache) == [["k0", "k6"], ["k3", "k4", "k5"], ["k0", "k1", "k2"]]
    assert [level.counts.hits for level in cache.levels] == [0, 0, 1]
    assert cache.levels[0].counts.promoted == 1
    assert [level.counts.evicted for level in cache.levels] == [6, 3, 0]
    assert cache.get("k7") is None and cache.misses == 1 and cache.lost == 0


def test_what_leaves_the_lowest_level_is_lost() -> None:
    cache = filled(tiers(1, 1), 3)
    assert contents(cache) == [["k2"], ["k1"]] and cache.get("k0") is None


def test_a_value_that_a_lower_level_has_is_not_written_again() -> None:
    cache = filled(tiers(1, None), 2)
    written = cache.levels[1].counts.bytes_written
    for _ in range(4):
        assert cache.get("k0") == b"v0" and cache.get("k1") == b"v1"
    assert cache.levels[1].counts.bytes_written == written + len(b"v1")


def test_what_must_stay_stays_and_the_new_value_goes_further_down() -> None:
    held: set[str] = set()
    cache = filled(tiers(2, 2, stays=held.__contains__), 2)
    held |= {"k0", "k1"}
    cache.set("new", b"new")
    assert contents(cache) == [["k0", "k1"], ["new"]]
    held.add("new")
    cache.set("newer", b"newer")
    held.add("newer")
    with pytest.raises(StoreError, match="no level takes"):
        cache.set("newest", b"newest")
    assert contents(cache) == [["k0", "k1"], ["new", "newer"]] and cache.lost == 1
    assert cache.get("new") == b"new"  # not promoted: there is no room
    assert contents(cache)[0] == ["k0", "k1"]


def test_deleting_removes_a_value_from_all_levels() -> None:
    cache = filled(tiers(1, None), 2)
    cache.get("k0")
    cache.delete("k0")
    assert not cache.exists("k0") and [*cache.list()] == ["k1"]


def test_a_flush_leaves_nothing_in_the_upper_levels_alone() -> None:
    cache = filled(tiers(2, 2, None), 3)
    cache.flush()
    assert contents(cache)[2] == ["k0", "k1", "k2"]
    full = filled(tiers(2, 1), 3)
    full.flush()
    assert contents(full) == [["k1", "k2"], ["k0"]]


def test_levels_take_over_what_an_earlier_process_has_stored() -> None:
    lower = MemoryBackend()
    for number in range(3):
        lower.set(f"chunks/{number}", b"old")
    lower.set("epoch", b"1")
    cache = Tiers([Level("disk", lower, 3)], lambda key: False, "chunks/")
    cache.set("chunks/new", b"new")
    assert sorted(lower.list()) == ["chunks/1", "chunks/2", "chunks/new", "epoch"]


def test_levels_begin_within_their_bounds() -> None:
    """An earlier engine had more ranks, and so more room; found by exploration."""
    lower = MemoryBackend()
    for number in range(5):
        lower.set(f"chunks/{number}", b"old")
    Tiers([Level("disk", lower, 3)], lambda key: False, "chunks/")
    assert len(list(lower.list())) == 3


def test_what_another_engine_has_stored_is_found_and_bounded() -> None:
    lower = MemoryBackend()
    cache = Tiers([Level("host", MemoryBackend(), 1), Level("disk", lower, 2)], lambda key: False)
    for number in range(4):
        lower.set(f"k{number}", b"theirs")
        assert cache.get(f"k{number}") == b"theirs"
    assert [len(keys) for keys in contents(cache)] == [1, 2]


@pytest.mark.parametrize("old", [b"older", b"damaged"])
def test_a_stored_value_takes_the_place_of_copies_further_down(old: bytes) -> None:
    cache = tiers(1, 1, None)
    cache.levels[1].backend.set("k", old)
    cache.levels[2].backend.set("k", old)
    cache.set("k", b"new")
    cache.set("other", b"x")
    cache.set("third", b"x")
    assert cache.get("k") == b"new"
    assert cache.levels[2].backend.get("k") == b"new"


def test_a_level_that_refuses_a_new_value_loses_the_old_one() -> None:
    upper = Refusing()
    upper.set("k", b"old")
    cache = Tiers([Level("host", upper), Level("disk", MemoryBackend())], lambda key: False)
    upper.refuses = ("set",)
    cache.set("k", b"new")
    assert cache.get("k") == b"new" and not upper.exists("k")


@pytest.mark.parametrize("place", [0, 1])
def test_a_value_that_cannot_be_replaced_is_a_failure(place: int) -> None:
    levels = [Level("host", MemoryBackend()), Level("disk", MemoryBackend())]
    levels[place].backend = fixed = Refusing()
    fixed.set("k", b"old")
    fixed.refuses = ("set", "delete")
    with pytest.raises(StoreError, match="read-only"):
        Tiers(levels, lambda key: False).set("k", b"new")


class Refusing(MemoryBackend):
    """A read-only back end, as far as `refuses` says."""

    refuses: tuple[str, ...] = ()

    def set(self, key: str, value: bytes) -> None:
        self._check("set")
        super().set(key, value)

    def delete(self, key: str) -> None:
        self._check("delete")
        super().delete(key)

    def _check(self, name: str) -> None:
        if name in self.refuses:
            raise StoreError("read-only")


class Broken(MemoryBackend):
    def set(self, key: str, value: bytes) -> None:
        raise StoreError("full")


def test_a_level_that_fails_is_passed_over() -> None:
    levels = [Level("host", Broken(), 2), Level("disk", MemoryBackend())]
    cache = filled(Tiers(levels, lambda key: False), 2)
    assert contents(cache) == [[], ["k0", "k1"]] and cache.get("k0") == b"v0"


class Small(MemoryBackend):
    """Has room for `size` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def set(self, key: str, value: bytes) -> None:
        if len(value) > self.size:
            raise StoreError("too large")
        others = sum(len(other) for name, other in self._values.items() if name != key)
        if others + len(value) > self.size:
            raise Full("no room")
        super().set(key, value)


def test_a_level_that_is_full_in_bytes_evicts_as_many_as_it_has_to() -> None:
    held: set[str] = set()
    levels = [Level("small", Small(4), 64), Level("disk", MemoryBackend())]
    cache = filled(Tiers(levels, held.__contains__), 5)
    assert contents(cache) == [["k3", "k4"], ["k0", "k1", "k2"]]
    assert cache.get("k0") == b"v0" and contents(cache)[0] == ["k0", "k4"]
    cache.set("k4", b"new")  # in the place of its own old value
    assert contents(cache)[0] == ["k4"] and levels[0].counts.evicted == 5
    held.add("k4")
    cache.set("other", b"xy")
    assert contents(cache)[0] == ["k4"] and cache.get("other") == b"xy"
    assert all(cache.exists(f"k{number}") for number in range(5)) and cache.lost == 0


def test_a_level_that_refuses_for_another_reason_keeps_its_values() -> None:
    levels = [Level("small", Small(4), 64), Level("disk", MemoryBackend())]
    cache = filled(Tiers(levels, lambda key: False), 2)
    cache.set("large", bytes(5))
    assert contents(cache) == [["k0", "k1"], ["large"]] and levels[0].counts.evicted == 0


def test_a_value_that_is_promoted_makes_room_further_down() -> None:
    cache = filled(tiers(1, 1), 2)
    assert cache.get("k0") == b"v0"
    assert contents(cache) == [["k0"], ["k1"]]


@pytest.mark.parametrize("evict", EVICTORS)
def test_a_value_that_is_gone_is_no_entry(evict: str) -> None:
    cache = filled(tiers(2, None, evict=evict), 2)
    for _ in range(3):
        cache.get("k0")
    cache.levels[0].backend.delete("k0")  # by another process
    assert cache.get("k0") is None
    cache.set("k2", b"v2")
    assert contents(cache)[0] == ["k1", "k2"] and cache.levels[0].counts.evicted == 0


def test_what_another_engine_has_stored_counts_when_it_is_replaced() -> None:
    cache = filled(tiers(1, 2), 3)
    cache.levels[1].backend.set("theirs", b"old")
    cache.set("theirs", b"new")
    assert [len(keys) for keys in contents(cache)] == [1, 2]
    assert cache.get("theirs") == b"new"


class Watched(MemoryBackend):
    """Notes which calls another thread could make at the same time."""

    cache: Tiers

    def __init__(self) -> None:
        super().__init__()
        self.unguarded: list[str] = []

    def get(self, key: str) -> bytes | None:
        self._look("get")
        return super().get(key)

    def set(self, key: str, value: bytes) -> None:
        self._look("set")
        super().set(key, value)

    def delete(self, key: str) -> None:
        self._look("delete")
        super().delete(key)

    def _look(self, call: str) -> None:
        def enter() -> None:
            if self.cache._lock.acquire(blocking=False):
                self.cache._lock.release()
                self.unguarded.append(call)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()


def test_one_thread_at_a_time_moves_values() -> None:
    upper, lower = Watched(), Watched()
    cache = Tiers([Level("host", upper, 1), Level("disk", lower)], lambda key: False)
    upper.cache = lower.cache = cache
    filled(cache, 3)
    assert cache.get("k0") and cache.peek("k1") and cache.move("k1", 0)
    cache.replace("k1", b"new")
    cache.flush()
    cache.delete("k2")
    assert upper.unguarded == lower.unguarded == []


# -- evictors


def test_lru_and_lfu_choose_different_victims() -> None:
    victims = {}
    for name, kind in (("lru", Lru), ("lfu", Lfu)):
        evictor = kind()
        for key in ("often", "often", "often", "b", "c"):
            evictor.used(key)
        victims[name] = evictor.victim(lambda key: False)
        assert evictor.victim(lambda key: True) is None
        assert evictor.victim(lambda key: key in ("often", "b")) == "c"
        evictor.removed("b")
        evictor.removed("b")
        assert "b" not in evictor and len(evictor) == 2
    assert victims == {"lru": "often", "lfu": "b"}


def test_lfu_forgets_how_often_an_evicted_entry_was_used() -> None:
    evictor = Lfu()
    for key in ("a", "a", "a", "b", "b"):
        evictor.used(key)
    evictor.removed("a")
    evictor.used("a")
    assert evictor.victim(lambda key: False) == "a"


# -- holds


def test_a_chunk_is_held_as_long_as_anyone_holds_it() -> None:
    holds = Holds()
    holds.take(["a", "b"])
    holds.take(["a"], times=2)
    holds.release(["a", "b"])
    assert "a" in holds and "b" not in holds and len(holds) == 2
    holds.release(["a"])
    holds.release(["a"])
    holds.release(["a"])  # once too often
    holds.take(["a"])
    assert len(holds) == 1


def test_threads_do_not_lose_holds() -> None:
    holds = Holds()

    def work() -> None:
        for _ in range(2000):
            holds.take(["a"])
            holds.release(["a"])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(holds) == 0 and "a" not in holds


# -- everything at once


class Machine(RuleBasedStateMachine):
    """Levels against a dictionary: nothing is wrong, beyond its bound, or lost while it is held."""

    evict = "lru"
    keys = st.sampled_from([f"k{number}" for number in range(9)])

    def __init__(self) -> None:
        super().__init__()
        self.holds = Holds()
        self.cache = tiers(2, 3, 4, stays=self.holds.__contains__, evict=self.evict)
        self.model: dict[str, bytes] = {}
        self.held: list[str] = []
        self.serial = 0

    @rule(key=keys)
    def store(self, key: str) -> None:
        self.serial += 1
        value = b"%d" % self.serial
        try:
            self.cache.set(key, value)
            self.model[key] = value
        except StoreError:
            assert all(
                level.entries.victim(self.cache._must_stay) is None for level in self.cache.levels
            )

    @rule(key=keys)
    def read(self, key: str) -> None:
        value = self.cache.get(key)
        assert value is None or value == self.model[key]
        assert value is not None or key not in self.held

    @rule(key=keys)
    def hold(self, key: str) -> None:
        if self.cache.exists(key):
            self.holds.take([key])
            self.held.append(key)

    @rule(data=st.data())
    def release(self, data: Any) -> None:
        if self.held:
            key = data.draw(st.sampled_from(self.held))
            self.held.remove(key)
            self.holds.release([key])

    @rule(key=keys)
    def delete(self, key: str) -> None:
        if key not in self.held:
            self.cache.delete(key)

    @invariant()
    def bounds_hold(self) -> None:
        for level in self.cache.levels:
            stored = set(level.backend.list())
            assert level.bound is not None and len(stored) <= level.bound
            assert stored == {key for key in stored if key in level.entries}
            assert len(level.entries) == len(stored)

    @invariant()
    def what_is_held_is_there(self) -> None:
        assert all(self.cache.exists(key) for key in self.held)


class LfuMachine(Machine):
    evict = "lfu"


Machine.TestCase.settings = LfuMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40
)
TestLru = Machine.TestCase
TestLfu = LfuMachine.TestCase


@given(st.lists(st.sampled_from("abcdef"), max_size=40))
@settings(max_examples=60)
def test_with_an_unbounded_lowest_level_nothing_is_lost(keys: list[str]) -> None:
    cache = tiers(1, 2, None)
    for key in keys:
        cache.set(key, key.encode())
    assert all(cache.get(key) == key.encode() for key in keys)
    assert cache.lost == 0
