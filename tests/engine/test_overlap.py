# SPDX-License-Identifier: Apache-2.0
"""Tests of a forward pass that the next step finds unfinished.

Also covers threads that are as fast as the streams.
"""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest

from kvconform.kv import gpu

pytest.importorskip("vllm")
import torch

from kvconform.emulation.emulate import emulate
from kvconform.emulation.note import DeviceFault
from kvconform.emulation.threads import settle
from kvconform.engine.worker import Overlap
from kvconform.kernels.codes import CodeBook
from kvconform.kv import device
from kvconform.kv.cache import PagedCache

BOOK = CodeBook(1, 1, 16)
SLOTS = np.array([5, 6])


class Pass:
    """A cache of 4 blocks of 4 slots in which a forward pass has written slots 5 and 6."""

    def __init__(self, before: int = 1, after: int = 2) -> None:
        self.cache = PagedCache(BOOK, 4, 4)
        self.overlap = Overlap(self.cache)
        self.cache.write_rows(0, SLOTS, np.full((2, 1, 32), before, dtype=np.float32))
        self.overlap.begin()
        device.current.launch(lambda: self.overlap.note(0, SLOTS))
        device.current.launch(
            lambda: self.cache.write_rows(0, SLOTS, np.full((2, 1, 32), after, dtype=np.float32))
        )

    def judge(self) -> None:
        """The end of the step."""
        device.current.finish()
        self.overlap.take_back()

    def values(self) -> list[float]:
        return [float(row[0, 0]) for row in self.cache.read(0, SLOTS)]


def test_what_a_step_wrote_is_pending_again_when_the_step_is_over() -> None:
    with gpu.opened("emulated", "compute"):
        step = Pass()
        step.judge()
        assert step.values() == [1.0, 1.0]
        assert (
            step.overlap.pending
            and step.overlap.holds([0, 1])
            and not step.overlap.holds([0, 2, 3])
        )
        device.current.finish()
        assert step.values() == [2.0, 2.0] and not step.overlap.pending
        assert [slots.tolist() for slots in step.cache.foreign()] == [[]]  # only the engine wrote


def test_who_waits_for_the_compute_stream_gets_what_was_written() -> None:
    with gpu.opened("emulated", "compute"):
        step = Pass()
        step.judge()
        with device.current.calling():
            side, host = torch.cuda.Stream(), torch.zeros(4, 1, 4, 32, pin_memory=True)
            early, late = host.clone().pin_memory(), host
            with torch.cuda.stream(side):
                early.copy_(step.cache.tensors[0], non_blocking=True)
            other = torch.cuda.Stream()
            other.wait_event(torch.cuda.current_stream().record_event())
            with torch.cuda.stream(other):
                late.copy_(step.cache.tensors[0], non_blocking=True)
        device.current.finish()
        assert (early[1, 0, 1, 0], late[1, 0, 1, 0]) == (1.0, 2.0)


@pytest.mark.parametrize("how", ["event", "stream", "device", "query", "answer"])
def test_a_step_whose_end_somebody_has_seen_stays_done(how: str) -> None:
    with gpu.opened("emulated", "compute"):
        step = Pass()
        with device.current.calling():
            if how == "event":
                torch.cuda.current_stream().record_event().synchronize()
            elif how == "stream":  # it goes on when the step is over
                torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
            elif how == "device":
                torch.cuda.synchronize()
            elif how == "query":
                while not torch.cuda.current_stream().query():
                    pass
            else:
                event = torch.cuda.current_stream().record_event()
                while not event.query():
                    pass
        step.judge()
        assert step.values() == [2.0, 2.0] and not step.overlap.pending


def test_an_event_that_nobody_asked_about_is_reached_later_too() -> None:
    with gpu.opened("emulated", "compute"):
        step = Pass()
        with device.current.calling():
            event = torch.cuda.current_stream().record_event()
            assert not torch.cuda.current_stream().query()
        step.judge()
        assert step.overlap.pending
        with device.current.calling():
            host, side = (
                torch.zeros(step.cache.tensors[0].shape, pin_memory=True),
                torch.cuda.Stream(),
            )
            side.wait_event(event)
            with torch.cuda.stream(side):
                host.copy_(step.cache.tensors[0], non_blocking=True)
        device.current.finish()
        assert step.values() == [2.0, 2.0] and host[1, 0, 1, 0] == 2.0


def test_a_thread_that_looks_while_a_step_is_taken_back_gets_what_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for an event that a hook has recorded, as HF3FS's thread does."""
    with gpu.opened("emulated", "compute"):
        step = Pass()
        with device.current.calling():
            event, side = torch.cuda.current_stream().record_event(), torch.cuda.Stream()
            host = torch.zeros(step.cache.tensors[0].shape, pin_memory=True)

            def look() -> None:
                side.wait_event(event)
                with torch.cuda.stream(side):
                    host.copy_(step.cache.tensors[0], non_blocking=True)

            thread = threading.Thread(target=look)
        poke, begun = step.cache.poke, []

        def slow_poke(layer: int, slots: np.ndarray, rows: torch.Tensor) -> None:
            poke(layer, slots, rows)
            if not begun:  # the older bytes are there, and the event counts as reached
                begun.append(thread.start())
                thread.join(0.2)

        monkeypatch.setattr(step.cache, "poke", slow_poke)
        step.judge()
        thread.join()
        device.current.finish()
        assert step.values() == [2.0, 2.0] and host[1, 0, 1, 0] == 2.0


@pytest.mark.parametrize("slow", ["transfers", None])
def test_nothing_is_taken_back_where_the_compute_stream_is_not_slow(slow: str | None) -> None:
    with gpu.opened("emulated", slow):
        step = Pass()
        step.judge()
        assert step.values() == [2.0, 2.0]


def test_nor_where_there_are_no_streams() -> None:
    step = Pass()
    step.judge()
    assert step.values() == [2.0, 2.0] and not step.overlap.pending


def test_what_fails_when_nobody_waits_any_more_is_nobodys_business() -> None:
    def fail() -> None:
        raise DeviceFault("on purpose")

    with gpu.opened("emulated", "compute") as opened:
        opened.launch(fail)
        opened.launch(fail)
    with gpu.opened("emulated", "compute") as opened:
        opened.launch(fail)
        opened.launch(fail)
        opened.finish()
        with pytest.raises(DeviceFault), opened.calling():
            pass
        with opened.calling():
            assert torch.cuda.is_available()


def test_a_thread_has_done_what_it_was_given_when_all_is_settled() -> None:
    with emulate("transfers") as cuda:
        given: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        side, host = torch.cuda.Stream(), torch.zeros(1, dtype=torch.uint8, pin_memory=True)
        kv = cuda.to_device(torch.ones(1, dtype=torch.uint8))

        def work() -> None:
            while (number := given.get()) is not None:
                for _ in range(number):
                    cuda.queue_copy(host.data_ptr(), kv.data_ptr(), 1, side)

        thread = threading.Thread(target=work)
        thread.start()
        for number in (1, 40, 200):
            before = cuda.pending()
            given.put(number)
            settle()
            assert cuda.pending() == before + number
        given.put(None)
        thread.join()
        settle()
