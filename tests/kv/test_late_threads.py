# SPDX-License-Identifier: Apache-2.0
"""Tests of the CPU on which the connector's threads are late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvconform.kv import device
from kvconform.kv.late_threads import LAG, PATIENCE, LateThreads, late_threads


@pytest.fixture
def late() -> Iterator[LateThreads]:
    with late_threads() as made, device.activate(made):
        yield made


class Work:
    """What a thread does: it notes that it was here."""

    def __init__(self, name: str = "copies") -> None:
        self.done = False
        self.thread = threading.Thread(target=self._do, name=name)
        self.thread.start()

    def _do(self) -> None:
        self._note()

    def _note(self) -> None:
        self.done = True


def steps(late: LateThreads, count: int) -> None:
    for _ in range(count):
        late.step_over()


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
    assert not work.done
    work.thread.join(timeout=10)
    assert work.done


def test_the_next_piece_of_work_waits_again(late: LateThreads) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: 1).result(timeout=10) == 1
        later = pool.submit(lambda: 2)
        steps(late, PATIENCE)
        assert not later.done()
        late.catch_up()
        assert later.result(timeout=10) == 2
        last = pool.submit(lambda: 3)
        steps(late, PATIENCE)
        assert not last.done()


def test_what_a_thread_starts_is_as_late(late: LateThreads) -> None:
    works: list[Work] = []
    late.driving(1)
    threading.Thread(target=lambda: works.append(Work())).start()
    late.driving(0)
    late.catch_up()  # lets it start the other one
    assert len(works) == 1
    late.catch_up()
    assert works[0].done


def test_afterwards_threads_are_not_late() -> None:
    with late_threads() as made, device.activate(made):
        before = Work()
    before.thread.join(timeout=10)
    assert before.done
    event = threading.Event()
    threading.Thread(target=event.set).start()
    assert event.wait(10)


def test_threads_of_the_harness_and_of_a_run_inside_are_not_late(late: LateThreads) -> None:
    ours = Work("kvconform-test")
    with device.activate(device.Cpu()):
        inner = Work()
    for work in ours, inner:
        work.thread.join(timeout=10)
    assert not late._gates
