# SPDX-License-Identifier: Apache-2.0
"""Tests of the holds of streams, with the process that releases them and without a device."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

import pytest

from kvconform.kv import held
from kvconform.kv.held import Holds, holds
from kvconform.process import alive

SOON = 20.0
"""Seconds in which something happens even on a busy machine."""


class Device:
    """Notes which streams wait for which number, and where."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []
        self.registered: list[int] = []
        self.address = 0

    def wait(self, stream: int, address: int, number: int) -> None:
        assert address == self.address
        self.waits.append((stream, number))

    def register(self, address: int) -> None:
        self.address = address
        self.registered.append(address)

    @property
    def released(self) -> int:
        return ctypes.c_uint32.from_address(self.address).value

    def unregister(self, address: int) -> None:
        until(lambda: all(number <= self.released for _, number in self.waits))
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
        made.hold(7)
        made.hold(0)
        time.sleep(0.05)
        assert (device.waits, device.released) == ([(7, 1), (0, 2)], 0)
        made.release()
        until(lambda: device.released == 2)
        made.hold(7)
        time.sleep(0.05)
        assert device.released == 2
    assert not device.registered


def test_a_hold_that_nobody_releases_ends() -> None:
    device = Device()
    with holds(device.wait, device.register, device.unregister) as made:
        made.hold(7)
        until(lambda: device.released == 1)
        made.hold(7)
        until(lambda: device.released == 2)


def test_holds_end_when_the_program_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "LIMIT", 0.2)
    device = Device()

    def failing() -> None:
        with holds(device.wait, device.register, device.unregister) as made:
            made.hold(7)
            raise RuntimeError("a hook")

    with pytest.raises(RuntimeError, match="a hook"):
        failing()
    assert not device.registered


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
