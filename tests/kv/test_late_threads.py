# SPDX-License-Identifier: Apache-2.0
"""Tests of the CPU on which the connector's threads are late.

Who waits by sleeping lets a stopped thread go on: where a test must not, it spins.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvconform.kv import device, late_threads
from kvconform.kv.late_threads import LAG, PATIENCE, LateThreads

START = threading.Thread.start
MANY_CALLS = 20_000


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateThreads]:
    """Provide the device, on which nothing is overdue however slow the machine is."""
    monkeypatch.setattr(late_threads, "OVERDUE", 60.0)
    monkeypatch.setattr(late_threads, "PAUSED", 60.0)
    with late_threads.late_threads() as made, device.activate(made):
        yield made


class Work:
    """What a thread does: it notes that it was here."""

    def __init__(self, name: str = "copies", then: Callable[[], object] = int) -> None:
        self.done = False
        self.then = then
        self.thread = threading.Thread(target=self._do, name=name)
        self.thread.start()

    def _do(self) -> None:
        self._note()
        self.then()

    def _note(self) -> None:
        self.done = True


def count(patch: pytest.MonkeyPatch, owner: object, name: str) -> list[tuple[object, ...]]:
    """Return a list that gets the arguments of each call of a method from now on."""
    made: list[tuple[object, ...]] = []
    method = getattr(owner, name)

    def counted(*args: object) -> object:
        made.append(args)
        return method(*args)

    patch.setattr(owner, name, counted)
    return made


def steps(late: LateThreads, count: int) -> None:
    for _ in range(count):
        late.step_over()


def spin(until: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait without sleep; return whether it came about."""
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        pass
    return until()


def test_a_thread_waits_for_as_many_steps(late: LateThreads) -> None:
    work = Work()
    steps(late, PATIENCE)
    assert not work.done
    steps(late, 1)
    assert work.done


def test_the_threads_of_the_next_rank_wait_for_more(late: LateThreads) -> None:
    first = Work()
    late.driving(1)
    second = Work()
    for _ in range(PATIENCE + 1):
        late.driving(0)
        late.step_over()
        late.driving(1)
        late.step_over()
    assert first.done
    assert not second.done
    steps(late, LAG)
    assert second.done


def test_a_thread_that_the_engine_waits_for_goes_on(late: LateThreads) -> None:
    work = Work()
    assert not spin(lambda: work.done, 0.02)
    work.thread.join(timeout=20)
    assert work.done


def calls() -> None:
    for _ in range(MANY_CALLS):
        len("")


@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_a_thread_that_the_engine_polls_goes_on(
    late: LateThreads, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(late_threads, "OVERDUE", 0.15)
    work = Work(then=calls)
    late.step_over()
    assert not work.done
    stops = count(monkeypatch, late._gates[0], "_stop")
    end = time.monotonic() + 20
    while work.thread.is_alive() and time.monotonic() < end:
        time.sleep(seconds)
    assert not work.thread.is_alive()
    assert len(stops) < MANY_CALLS / 10


def test_a_thread_that_the_engine_waits_for_is_neither_stopped_nor_looked_at_again_and_again(
    late: LateThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = count(monkeypatch, late._engine, "look")
    work = Work(then=calls)
    stops = count(monkeypatch, late._gates[0], "_stop")
    work.thread.join(timeout=60)
    assert not work.thread.is_alive()
    assert len(looks) < MANY_CALLS / 10
    assert len(stops) < MANY_CALLS / 10


def test_the_next_piece_of_work_waits_again(late: LateThreads) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: 1).result(timeout=20) == 1
        later = pool.submit(lambda: 2)
        steps(late, PATIENCE)
        assert not later.done()
        late.catch_up()
        assert later.done()
        last = pool.submit(lambda: 3)
        steps(late, PATIENCE)
        assert not last.done()


def test_what_a_thread_starts_is_of_the_same_rank(late: LateThreads) -> None:
    works: list[Work] = []
    late.driving(1)
    outer = threading.Thread(target=lambda: works.append(Work()))
    outer.start()
    late.driving(0)
    outer.join(timeout=20)
    assert list(late._gates) == [1]
    assert vars(works[0].thread)["kvconform_gate"] is late._gates[1]


def test_a_thread_may_sleep_a_little_when_it_was_let_go(late: LateThreads) -> None:
    def in_parts() -> None:
        for _ in range(5):
            time.sleep(0.001)

    work = Work(then=in_parts)
    late.catch_up()
    assert spin(lambda: not work.thread.is_alive())


def test_afterwards_threads_are_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_threads, "OVERDUE", 60.0)
    with late_threads.late_threads() as made, device.activate(made):
        before = Work()
        assert threading.Thread.start is not START
    assert threading.Thread.start is START
    assert spin(lambda: before.done)
    after = Work()
    assert spin(lambda: after.done)


def test_a_thread_that_outlives_the_run_is_not_watched() -> None:
    profiled = []
    with late_threads.late_threads() as made, device.activate(made):
        pool = ThreadPoolExecutor(1)
        pool.submit(int).result(timeout=20)
    with pool:
        pool.submit(int).result(timeout=20)
        pool.submit(lambda: profiled.append(sys.getprofile())).result(timeout=20)
    assert profiled == [None]


def test_threads_of_the_harness_and_of_a_run_inside_are_not_late(late: LateThreads) -> None:
    ours = Work("kvconform-test")
    with device.activate(device.Cpu()):
        inner = Work()
    assert spin(lambda: ours.done and inner.done)


def test_a_thread_that_has_ended_is_let_go(late: LateThreads) -> None:
    work = Work()
    thread = weakref.ref(work.thread)
    work.thread.join(timeout=20)
    del work
    gc.collect()
    assert thread() is None
    assert "Dummy" not in " ".join(each.name for each in threading.enumerate())


def test_a_thread_that_cannot_start_is_not_waited_for(late: LateThreads) -> None:
    work = Work()
    work.thread.join(timeout=20)
    with pytest.raises(RuntimeError, match="only be started once"):
        work.thread.start()
    assert not late._gates[0]._threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_threads_of_a_forked_process_are_not_late(late: LateThreads) -> None:
    Work()
    child = os.fork()
    if child == 0:
        work = Work()
        late.catch_up()
        os._exit(0 if spin(lambda: work.done) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_thread_that_forks_is_not_late_in_the_new_process(late: LateThreads) -> None:
    codes: list[int] = []

    def forks() -> None:
        child = os.fork()
        if child == 0:
            len("")
            os._exit(0 if sys.getprofile() is None else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    work = Work(then=forks)
    work.thread.join(timeout=20)
    assert codes == [0]
