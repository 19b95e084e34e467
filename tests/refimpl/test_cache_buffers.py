# SPDX-License-Identifier: Apache-2.0
"""Tests of batches, prefetch and double buffering."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import pytest

from kvconform.refimpl.cache.backend import StoreError
from kvconform.refimpl.cache.batches import batches, get_many, set_many
from kvconform.refimpl.cache.chunks import ChunkStore
from kvconform.refimpl.cache.memory import MemoryBackend
from kvconform.refimpl.cache.patience import Patient
from kvconform.refimpl.cache.prefetch import Prefetching
from kvconform.refimpl.cache.staging import BUFFERS, Buffer, Staging

SOON = 5.0
"""Seconds that no thread should need."""


class Counted(MemoryBackend):
    """Counts its batched calls, and can make one wait or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.may_read = threading.Event()
        self.may_read.set()
        self.fails = False

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        assert self.may_read.wait(SOON)
        self.calls.append(("get", len(keys)))
        if self.fails:
            raise StoreError("no")
        return {key: self._values[key] for key in keys if key in self._values}

    def set_many(self, values: Mapping[str, bytes]) -> None:
        self.calls.append(("set", len(values)))
        self._values.update(values)


@pytest.fixture
def backend() -> Counted:
    return Counted()


@pytest.fixture
def memory(backend: Counted) -> Iterator[Prefetching]:
    for number in range(5):
        backend.set(f"k{number}", b"v%d" % number)
    made = Prefetching(backend, bound=4, batch=2)
    yield made
    backend.may_read.set()
    made.close()
    made.close()


def arrive(memory: Prefetching, owner: str, *keys: str) -> None:
    """Prefetch, and wait until nothing is under way."""
    deadline = threading.Event()
    for _ in range(int(SOON / 0.002)):
        if memory.prefetch(owner, keys):
            return
        deadline.wait(0.002)
    raise AssertionError("the values did not arrive")


# -- batches


def test_the_last_batch_has_what_is_left() -> None:
    assert [*batches(range(5), 2)] == [[0, 1], [2, 3], [4]]
    assert [*batches([], 2)] == [] and [*batches("ab", 2)] == [["a", "b"]]


def test_a_back_end_without_batched_calls_is_called_for_each_value() -> None:
    plain = MemoryBackend()
    set_many(plain, {"a": b"1", "b": b"2"})
    assert get_many(plain, ["a", "c", "b"]) == {"a": b"1", "b": b"2"}


def test_an_empty_batch_is_no_call(backend: Counted) -> None:
    set_many(backend, {})
    assert get_many(backend, []) == {} and backend.calls == []


def test_a_failed_batch_silences_the_server(backend: Counted) -> None:
    patient = Patient(backend, "server of this test", 60.0)
    backend.fails = True
    with pytest.raises(StoreError, match="no"):
        get_many(patient, ["a"])
    with pytest.raises(StoreError, match="recent call"):
        set_many(patient, {"a": b"1"})
    assert backend.calls == [("get", 1)]


def test_chunks_are_stored_and_read_in_one_call_each(backend: Counted) -> None:
    store = ChunkStore(backend)
    for key in ("a", "b"):
        store.put(0, key, "l0", key.encode())
    store.commit_many(0, ["a", "b", "not-put"])
    assert store.read_many(["a", "missing", "b"]) == [{"l0": b"a"}, {}, {"l0": b"b"}]
    assert backend.calls == [("set", 2), ("get", 2)]


def test_a_batch_that_a_reset_overtakes_is_not_visible(backend: Counted) -> None:
    store = ChunkStore(backend)
    store.put(0, "a", "l0", b"a")
    assert store.reset()
    store.commit_many(0, ["a"])
    assert not store.has("a") and store.read_many(["a"]) == [{}]


def test_a_batch_that_cannot_be_stored_is_lost() -> None:
    class Full(Counted):
        def set_many(self, values: Mapping[str, bytes]) -> None:
            raise StoreError("full")

    store = ChunkStore(Full())
    for key in ("a", "b"):
        store.put(0, key, "l0", b"x")
    store.commit_many(0, ["a", "b"])
    assert store.lost == 2 and not store.has("a")


# -- prefetch


def test_prefetched_values_are_read_without_a_call(memory: Prefetching, backend: Counted) -> None:
    backend.may_read.clear()
    assert not memory.prefetch("r", ["k0", "k1", "k2"])
    assert memory.get("k0") == b"v0"  # from the back end: it does not wait
    backend.may_read.set()
    arrive(memory, "r", "k0", "k1", "k2")
    assert sorted(backend.calls) == [("get", 1), ("get", 2)] and len(memory) == 3
    assert memory.get_many(["k0", "k2"]) == {"k0": b"v0", "k2": b"v2"}
    assert len(backend.calls) == 2
    assert memory.get_many(["k0", "k3"]) == {"k0": b"v0", "k3": b"v3"}
    assert backend.calls[2:] == [("get", 1)]


def test_a_value_stays_until_its_last_owner_releases_it(memory: Prefetching) -> None:
    arrive(memory, "r", "k0", "k1")
    arrive(memory, "s", "k1")
    memory.release("r")
    assert len(memory) == 1
    memory.release("s")
    memory.release("s")
    assert len(memory) == 0


def test_it_fetches_up_to_its_bound_and_reads_what_is_beyond(memory: Prefetching) -> None:
    arrive(memory, "r", *(f"k{number}" for number in range(5)))
    assert len(memory) == 4 and memory.get("k4") == b"v4"


def test_a_value_that_is_gone_is_not_waited_for(memory: Prefetching) -> None:
    arrive(memory, "r", "k0", "gone")
    assert not memory.exists("gone") and memory.get("gone") is None and len(memory) == 1


def test_a_back_end_that_fails_leaves_nothing_behind(memory: Prefetching, backend: Counted) -> None:
    backend.fails = True
    memory.prefetch("r", ["k0"])
    memory._thread.shutdown()  # type: ignore[union-attr]
    assert len(memory) == 0


def test_values_of_a_fetch_that_raised_are_not_waited_for(
    memory: Prefetching, backend: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(keys: Sequence[str]) -> dict[str, bytes]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(backend, "get_many", breaks)
    memory.prefetch("r", ["k0", "k1"])
    memory._thread.shutdown()  # type: ignore[union-attr]
    assert len(memory) == 0 and memory.prefetch("r", ["k0", "k1"])


def test_nothing_is_fetched_after_the_end(memory: Prefetching) -> None:
    memory.close()
    assert memory.prefetch("r", ["k0"]) and memory._thread is None
    assert len(memory) == 0 and memory.get("k0") == b"v0"


@pytest.mark.parametrize(
    "change", [lambda memory: memory.delete("k0"), lambda memory: memory.set("k0", b"new")]
)
@pytest.mark.parametrize("under_way", [False, True])
def test_what_is_deleted_or_replaced_is_not_served(
    change: Callable[[Prefetching], None], under_way: bool, memory: Prefetching, backend: Counted
) -> None:
    if under_way:
        backend.may_read.clear()
        memory.prefetch("r", ["k0"])
    else:
        arrive(memory, "r", "k0")
    change(memory)
    backend.may_read.set()
    if memory._thread is not None:
        memory._thread.shutdown()
    assert memory.get("k0") == backend.get("k0") and len(memory) == 0
    assert memory.exists("k0") == backend.exists("k0")


# -- two buffers


@pytest.fixture
def staging() -> Iterator[Staging[int]]:
    made: Staging[int] = Staging()
    yield made
    made.close()
    made.close()


def put(batch: int, buffer: Buffer) -> None:
    buffer.fill({(0, "l"): b"%d" % batch, (1, "l"): b"second of %d" % batch})


def test_a_buffer_is_addressed_by_place_and_grows() -> None:
    buffer = Buffer()
    put(1, buffer)
    kept = buffer.get((1, "l"))
    buffer.fill({(0, "l"): b"longer than before " * 9})
    assert kept == b"second of 1" and buffer.get((1, "l")) is None
    assert buffer.get((0, "l")) == b"longer than before " * 9


@pytest.mark.parametrize("count", range(6))
def test_every_batch_comes_in_once_and_in_order(count: int, staging: Staging[int]) -> None:
    found = [(n, buffer.get((0, "l"))) for n, buffer in staging.incoming(range(count), put)]
    assert found == [(n, b"%d" % n) for n in range(count)]


@pytest.mark.parametrize("count", range(6))
def test_every_batch_goes_out_before_its_buffer_is_used_again(
    count: int, staging: Staging[int]
) -> None:
    stored: list[tuple[int, bytes | None]] = []
    for n, buffer in staging.outgoing(
        range(count), lambda n, buffer: stored.append((n, buffer.get((0, "l"))))
    ):
        put(n, buffer)
    assert stored == [(n, b"%d" % n) for n in range(count)]


def test_the_thread_fills_one_buffer_while_the_other_is_copied(staging: Staging[int]) -> None:
    filled: list[Future[None]] = [Future() for _ in range(4)]

    def fill(batch: int, buffer: Buffer) -> None:
        put(batch, buffer)
        filled[batch].set_result(None)

    for batch, buffer in staging.incoming(range(4), fill):
        if batch < 3:
            filled[batch + 1].result(SOON)  # the next one is there before this one is copied
        assert buffer.get((0, "l")) == b"%d" % batch
        assert sum(future.done() for future in filled) <= batch + BUFFERS


def test_what_a_thread_raises_reaches_the_caller(staging: Staging[int]) -> None:
    def fails(batch: int, buffer: Buffer) -> None:
        raise StoreError(f"batch {batch}")

    with pytest.raises(StoreError, match="batch 0"):
        list(staging.incoming(range(3), fails))
    with pytest.raises(StoreError, match="batch 0"):
        list(staging.outgoing(range(3), fails))


def test_a_transfer_waits_for_what_an_ended_one_has_left_to_the_thread(
    staging: Staging[str],
) -> None:
    """Otherwise the thread would store the next data under the key of the earlier ones."""
    filled, stored = threading.Event(), {}

    def drain(batch: str, buffer: Buffer) -> None:
        if batch == "a":
            filled.wait(0.1)
        stored[batch] = buffer.get((0, "l"))

    def store(batches: str, ends_at: str = "") -> None:
        for batch, buffer in staging.outgoing(batches, drain):
            if batch == ends_at:
                raise ValueError
            buffer.fill({(0, "l"): batch.encode()})

    with pytest.raises(ValueError):
        store("ab", ends_at="b")
    for _, buffer in staging.outgoing("c", drain):
        buffer.fill({(0, "l"): b"c"})
        filled.set()
    assert stored == {"a": b"a", "c": b"c"}


def test_a_buffer_is_not_filled_for_an_ended_transfer_while_it_is_used(
    staging: Staging[str],
) -> None:
    used, stored = threading.Event(), []

    def fill(batch: str, buffer: Buffer) -> None:
        if batch == "c":
            used.wait(0.1)
        buffer.fill({(0, "l"): batch.encode()})

    def load(batches: str, ends_at: str) -> None:
        for batch, _ in staging.incoming(batches, fill):
            if batch == ends_at:
                raise ValueError

    with pytest.raises(ValueError):
        load("abc", ends_at="b")
    for _, buffer in staging.outgoing(
        "x", lambda batch, buffer: stored.append(buffer.get((0, "l")))
    ):
        buffer.fill({(0, "l"): b"x"})
        used.set()
    assert stored == [b"x"]
