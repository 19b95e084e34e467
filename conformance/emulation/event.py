# SPDX-License-Identifier: Apache-2.0
"""Emulated torch.Event and torch.cuda.Event."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from .context import Emulation, active
from .errors import NotEmulated
from .machine import Mark

if TYPE_CHECKING:
    from .stream import GenericStream


class GenericEvent:
    """torch.Event: a mark in a stream. Recording again moves it; waits that were asked for before keep the old place. An event that was
    never recorded is complete, and waiting for it does nothing."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing = enable_timing
        self.mark: Mark | None = None
        self._time: list[int] = []  # machine clock when the latest record's turn came
        self._emulation: Emulation | None = None

    def record(self, stream: GenericStream | None = None) -> None:
        """Mark the place behind everything queued so far on a stream (the current one by default)."""
        emulation = self._emulation = active() if stream is None else stream.emulation
        queue = emulation.queue if stream is None else stream.queue
        with emulation.machine.lock, emulation.raw():
            if self.enable_timing:
                time = self._time = []
                emulation.put(queue, lambda: time.append(emulation.machine.clock))
            self.mark = emulation.machine.mark(queue)

    def wait(self, stream: GenericStream | None = None) -> None:
        """Hold later work of a stream (the current one by default) until the mark of now is reached."""
        mark = self.mark
        if mark is not None and self._emulation is not None:
            emulation = self._emulation
            with emulation.raw():
                emulation.machine.wait(emulation.queue if stream is None else stream.queue, mark)

    def synchronize(self) -> None:
        """Wait, as the host, for the mark. Noted, unless it has been reached."""
        if self.mark is not None and self._emulation is not None:
            with self._emulation.raw() if self.mark.reached else nullcontext():
                self._emulation.demand(self.mark, "event.synchronize()")

    def query(self) -> bool:
        """Whether the mark is reached. A mark that is not says so `patience` times, then its stream is run up to it."""
        if self.mark is None or self._emulation is None:
            return True
        with self._emulation.raw():
            return self._emulation.machine.answer(self.mark)

    def elapsed_time(self, end: GenericEvent) -> float:
        """Milliseconds between two reached marks; a hundredth for each piece of work that ran between them. RuntimeError as CUDA's when
        one was made without timing, not recorded, or not reached."""
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("elapsed_time() needs two events made with enable_timing=True.")
        if self.mark is None or end.mark is None:
            raise RuntimeError("elapsed_time() needs two events that have been recorded.")
        if not (self._time and end._time):
            raise RuntimeError("elapsed_time() of an event that has not completed.")
        return (end._time[0] - self._time[0]) * 0.01

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    @property
    def event_id(self) -> int:
        return id(self)

    def ipc_handle(self) -> Any:
        raise NotEmulated("event shared between processes (ipc_handle)")

    @classmethod
    def from_ipc_handle(cls, *args: Any) -> Any:
        raise NotEmulated("event shared between processes (from_ipc_handle)")

    def __repr__(self) -> str:
        state = "not recorded" if self.mark is None else "complete" if self.mark.reached else "pending"
        return f"<emulated {type(self).__name__} {state}>"


class Event(GenericEvent):
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False) -> None:
        super().__init__(enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    @property
    def cuda_event(self) -> int:
        return id(self)
