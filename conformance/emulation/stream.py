# SPDX-License-Identifier: Apache-2.0
"""Emulated streams and events of torch and torch.cuda."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from kvconform.emulation.context import STATE, Emulation, active
from kvconform.emulation.machine import Mark, Queue
from kvconform.emulation.note import NotEmulated


class GenericEvent:
    """torch.Event: a mark in a stream.

    Recording the event again moves the mark; earlier waits keep the old place. An event that was
    never recorded is complete, and waiting for it does nothing.
    """

    def __init__(
        self,
        device: Any = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        self.enable_timing = enable_timing
        self.mark: Mark | None = None
        self._time: list[int] = []  # machine clock when the latest record's turn came
        self._emulation: Emulation | None = None

    def record(self, stream: GenericStream | None = None) -> None:
        """Mark the place after everything queued so far on a stream (default: the current one)."""
        emulation = self._emulation = active() if stream is None else stream.emulation
        queue = emulation.queue if stream is None else stream.queue
        with emulation.machine.lock, emulation.raw():
            if self.enable_timing:
                time = self._time = []
                emulation.put(queue, lambda: time.append(emulation.machine.clock))
            self.mark = emulation.machine.mark(queue)

    def wait(self, stream: GenericStream | None = None) -> None:
        """Hold later work of a stream (default: the current one) until the mark is reached.

        The mark is the event's mark at the time of the call.
        """
        mark = self.mark
        if mark is not None and self._emulation is not None:
            emulation = self._emulation
            with emulation.raw():
                emulation.machine.wait(emulation.queue if stream is None else stream.queue, mark)

    def synchronize(self) -> None:
        """Wait, as the host, for the mark; noted, unless it has been reached."""
        if self.mark is not None and self._emulation is not None:
            with self._emulation.raw() if self.mark.reached else nullcontext():
                self._emulation.demand(self.mark, "event.synchronize()")

    def query(self) -> bool:
        """Return whether the mark is reached.

        Returns False at most `patience` times for one mark, then runs its stream up to it.
        """
        if self.mark is None or self._emulation is None:
            return True
        with self._emulation.raw():
            return self._emulation.machine.poll(self.mark)

    def elapsed_time(self, end: GenericEvent) -> float:
        """Return the milliseconds between two reached marks.

        Each piece of work that ran between them counts as a hundredth. As in CUDA, raises
        RuntimeError if an event was made without timing, is not recorded, or is not reached.
        """
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("elapsed_time() needs two events made with enable_timing=True.")
        if self.mark is None or end.mark is None:
            raise RuntimeError("elapsed_time() needs two events that have been recorded.")
        if not (self._time and end._time):
            raise RuntimeError("elapsed_time() of an event that has not completed.")
        return (end._time[0] - self._time[0]) * 0.01

    @property
    def device(self) -> torch.device:
        """The emulated device."""
        return torch.device("cuda", 0)

    @property
    def event_id(self) -> int:
        """A number that identifies the event."""
        return id(self)

    def ipc_handle(self) -> Any:
        """Raise NotEmulated."""
        raise NotEmulated("event shared between processes (ipc_handle)")

    @classmethod
    def from_ipc_handle(cls, *args: Any) -> Any:
        """Raise NotEmulated."""
        raise NotEmulated("event shared between processes (from_ipc_handle)")

    def __repr__(self) -> str:
        if self.mark is None:
            state = "not recorded"
        elif self.mark.reached:
            state = "complete"
        else:
            state = "pending"
        return f"<emulated {type(self).__name__} {state}>"


class Event(GenericEvent):
    """torch.cuda.Event."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        super().__init__(enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    @property
    def cuda_event(self) -> int:
        """A number that stands for the cudaEvent_t."""
        return id(self)


class GenericStream:
    """torch.Stream: one queue of work on the emulated device.

    Two streams are equal if they have the same queue.
    """

    def __init__(
        self, device: Any = None, *, priority: int = 0, queue: Queue | None = None, **ids: Any
    ) -> None:
        if device is None or isinstance(device, int):
            index = device
        else:
            index = torch.device(device).index
        if index:
            raise NotEmulated(f"second device (cuda:{index})")
        self.emulation = active()
        machine = self.emulation.machine
        handle = ids.get("stream_id")
        if queue is None and handle is not None:
            queue = next((known for known in machine.queues if known.handle == handle), None)
            if queue is None:
                raise ValueError(f"No stream of the emulated device has the handle {handle:#x}.")
        if queue is None:
            queue = machine.new_queue(f"stream {len(machine.queues) - 1}", priority)
        self.queue = queue

    @property
    def priority(self) -> int:
        """The priority it was made with; it has no effect."""
        return self.queue.priority

    @property
    def stream_id(self) -> int:
        """The cudaStream_t as a number."""
        return self.queue.handle

    native_handle = stream_id

    @property
    def device(self) -> torch.device:
        """The emulated device."""
        return torch.device("cuda", 0)

    device_index = 0
    device_type = 1  # CUDA in c10::DeviceType

    def wait_event(self, event: GenericEvent) -> None:
        """Hold later work of this stream until the event's present mark is reached."""
        event.wait(self)

    def wait_stream(self, stream: GenericStream) -> None:
        """Hold later work of this stream until what is queued on the other one is done."""
        machine = self.emulation.machine
        with self.emulation.raw():
            machine.wait(self.queue, machine.mark(stream.queue))

    def record_event(self, event: GenericEvent | None = None) -> GenericEvent:
        """Record an event (default: a new one) on this stream and return it."""
        if event is None:
            event = Event() if isinstance(self, Stream) else GenericEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait, as the host, for everything queued so far; noted, unless all of it is done."""
        with self.emulation.raw() if self.queue.done == self.queue.put else nullcontext():
            self.emulation.synchronize(self.queue, "stream.synchronize()")

    def query(self) -> bool:
        """Return whether all work is done.

        Returns False at most `patience` times in a row, then runs the stream.
        """
        machine = self.emulation.machine
        queue = self.queue
        with machine.lock, self.emulation.raw():
            if not queue.entries:
                queue.polls = 0
                queue.seen = queue.put
                return True
            queue.polls += 1
            if queue.polls <= machine.refusals:
                return False
            queue.polls = 0
            machine.demand(machine.mark(queue))
            queue.seen = queue.put
            return True

    def __enter__(self) -> GenericStream:
        active()
        self._outer = [*getattr(self, "_outer", []), STATE.queue]
        STATE.queue = self.queue
        return self

    def __exit__(self, *exc: object) -> None:
        STATE.queue = self._outer.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GenericStream) and other.queue is self.queue

    def __hash__(self) -> int:
        return hash((self.device, self.queue.handle))

    def __repr__(self) -> str:
        return f"<emulated {type(self).__name__} {self.queue.name!r} handle={self.queue.handle:#x}>"


class Stream(GenericStream):
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, **ids: Any) -> None:
        super().__init__(device, priority=priority, **ids)

    @property
    def cuda_stream(self) -> int:
        """The cudaStream_t as a number; 0 for the default stream only."""
        return self.queue.handle

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority."""
        return 0, -5


class ExternalStream(Stream):
    """torch.cuda.ExternalStream: the stream with this handle; ValueError if there is none."""

    def __init__(self, stream_ptr: int, device: Any = None, **ids: Any) -> None:
        super().__init__(device, stream_id=stream_ptr)


class StreamContext:
    """torch.cuda.stream(...): makes a stream the thread's current one; None has no effect."""

    def __init__(self, stream: GenericStream | None) -> None:
        self.stream = stream
        self._outer: list[Queue | None] = []

    def __enter__(self) -> GenericStream | None:
        active()
        self._outer.append(STATE.queue)
        if self.stream is not None:
            STATE.queue = self.stream.queue
        return self.stream

    def __exit__(self, *exc: object) -> None:
        outer = self._outer.pop()
        if self.stream is not None:
            STATE.queue = outer
