# SPDX-License-Identifier: Apache-2.0
"""Tests of the holds of streams, with the process that releases them and without a device."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
import torch

from kvconform.errors import EnvironmentProblem
from kvconform.kv import held
from kvconform.kv.held import Holds, Mark, holds
from kvconform.process import alive, clock

SOON = 20.0
"""Seconds in which something happens even on a busy machine."""


class Device:
    """Notes which place waits for which number, and for which streams."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []
        self.streams: list[int] = []
        self.registered: list[int] = []
        self.address = 0

    def wait(self, stream: int, address: int, number: int) -> None:
        self.streams.append(stream)
        self.waits.append(((address - self.address) // 4, number))

    def register(self, address: int) -> None:
        self.address = address
        self.registered.append(address)

    def released(self, place: int) -> int:
        return ctypes.c_uint32.from_address(self.address + 4 * place).value

    def unregister(self, address: int) -> None:
        until(lambda: all(number <= self.released(place) for place, number in self.waits))
        self.registered.remove(address)


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_hold_lasts_until_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "LIMIT", 1000.0)
    device = Device()
    with holds(device.wait, device.register, device.unregister) as made:
        for stream in (7, 0, 7):
            made.hold(stream)
        time.sleep(0.05)
        assert device.streams == [7, 0, 7]
        assert device.waits == [(0, 1), (1, 1), (0, 2)]
        assert (device.released(0), device.released(1)) == (0, 0)
        made.release(Mark(7, 1))
        until(lambda: device.released(0) == 1)
        made.release()
        until(lambda: (device.released(0), device.released(1)) == (2, 1))
        made.hold(7)
        time.sleep(0.05)
        assert device.released(0) == 2
    assert not device.registered


def test_a_hold_that_nobody_releases_ends() -> None:
    device = Device()
    with holds(device.wait, device.register, device.unregister) as made:
        for number in (1, 2):
            made.hold(7)
            until(lambda number=number: device.released(0) == number)
            made.next_step()


def test_clocks_that_were_set_forward_make_no_hold_last_longer() -> None:
    device = Device()
    with clock.of_run(), holds(device.wait, device.register, device.unregister) as made:
        clock.advance(1000.0)  # as a case does in which a lease runs out
        made.hold(7)
        until(lambda: device.released(0) == 1)


def test_what_a_stream_waits_for_is_released_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "LIMIT", 1000.0)
    device = Device()
    with holds(device.wait, device.register, device.unregister) as made:
        compute, load, store, other = 0, 1, 2, 3
        for stream in (load, store, other):
            made.hold(stream)
        made.follows(load, made.mark(store))
        made.follows(compute, made.mark(load))
        made.hold(load)  # the compute stream does not wait for this hold
        made.follows(load, made.mark(other))
        made.release(made.mark(compute))
        places = [0, 1, 2]
        until(lambda: [device.released(place) for place in places] == [1, 1, 0])
        time.sleep(0.05)
        assert [device.released(place) for place in places] == [1, 1, 0]
        made.release(made.mark(load))
        until(lambda: [device.released(place) for place in places] == [2, 1, 1])


def test_holds_end_when_the_program_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "LIMIT", 1000.0)
    device = Device()

    def failing() -> None:
        with holds(device.wait, device.register, device.unregister) as made:
            made.hold(7)
            assert device.released(0) == 0
            raise RuntimeError("a hook")

    with pytest.raises(RuntimeError, match="a hook"):
        failing()
    assert not device.registered


def test_what_was_released_stays_so_when_the_time_of_an_older_hold_comes() -> None:
    device = Device()
    with holds(device.wait, device.register, device.unregister) as made:
        made.hold(7)
        made.hold(7)
        made.release()
        until(lambda: device.released(0) == 2)
        time.sleep(3 * held.LIMIT)
        assert device.released(0) == 2


def test_a_stream_is_held_again_in_the_next_step_if_its_hold_ended_by_itself() -> None:
    device = Device()
    with holds(device.wait, device.register, device.unregister) as made:
        made.hold(7)
        until(lambda: device.released(0) == 1)
        made.hold(7)
        made.hold(8)
        assert device.streams == [7, 8]
        made.next_step()
        made.hold(7)
        assert device.streams == [7, 8, 7]


def test_a_process_that_was_forked_meanwhile_does_not_delay_the_end() -> None:
    device = Device()
    with holds(device.wait, device.register, device.unregister):
        child = os.fork()
        if not child:
            time.sleep(SOON)
            os._exit(0)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_without_the_process_that_releases_nothing_is_held() -> None:
    device = Device()
    with holds(device.wait, device.register, device.unregister) as made:
        made.hold(7)
        until(lambda: device.released(0) == 1)  # it has begun, and has its command line
        [releasing] = [
            each for each in psutil.Process().children() if held.releaser.__file__ in each.cmdline()
        ]
        releasing.send_signal(signal.SIGINT)  # of a terminal: it goes on
        made.next_step()
        made.hold(7)
        until(lambda: device.released(0) == 2)
        releasing.terminate()
        releasing.wait(SOON)
        made.hold(8)
        made.release()
        assert device.streams == [7, 7]


def test_a_stream_without_a_place_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held.releaser, "PLACES", 1)
    device = Device()
    with holds(device.wait, device.register, device.unregister) as made:
        made.hold(7)
        made.hold(8)
        made.release(made.mark(8))
        assert device.streams == [7]


def test_nothing_is_asked_twice() -> None:
    read, write = os.pipe()
    made = Holds(lambda *_: None, 0, write)
    made.release()
    made.hold(1)
    made.release()
    made.release()
    os.close(write)
    assert len(os.read(read, 1000)) == 2 * held.releaser.REQUEST.size
    os.close(read)


def test_the_process_counts_as_the_harness_own() -> None:
    before = alive.of_connectors()
    device = Device()
    with holds(device.wait, device.register, device.unregister):
        assert alive.of_connectors() == before


def test_only_the_first_wait_tells_whether_the_device_can_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later error is the connector's, and its own next call raises it."""
    statuses: list[int] = []
    driver = SimpleNamespace(cuStreamWaitValue32_v2=lambda *_: statuses.pop(0))
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with held.on_this_device() as made:
        statuses[:] = [0, 700]
        made.hold(7)
        made.hold(7)
        assert not statuses
    with held.on_this_device() as made:
        statuses[:] = [801]
        with pytest.raises(EnvironmentProblem, match="CUDA error 801"):
            made.hold(7)
