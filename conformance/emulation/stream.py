# SPDX-License-Identifier: Apache-2.0
"""Emulated torch.Stream, torch.cuda.Stream and torch.cuda.ExternalStream."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from .context import active
from .errors import NotEmulated
from .event import Event, GenericEvent
from .machine import Queue
from .thread import STATE


class GenericStream:
    """torch.Stream: one queue of work on the emulated device. Two streams are equal when they are the same queue."""

    def __init__(self, device: Any = None, *, priority: int = 0, queue: Queue | None = None, **ids: Any) -> None:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        if index:
            raise NotEmulated(f"second device (cuda:{index})")
        self.emulation = active()
        machine = self.emulation.machine
        handle = ids.get("stream_id")
        if queue is None and handle is not None:
            queue = next((known for known in machine.queues if known.handle == handle), None)
            if queue is None:
                raise ValueError(f"No stream of the emulated device has the handle {handle:#x}.")
        self.queue = machine.new_queue(f"stream {len(machine.queues) - 1}", priority) if queue is None else queue

    @property
    def priority(self) -> int:
        return self.queue.priority

    @property
    def stream_id(self) -> int:
        return self.queue.handle

    native_handle = stream_id

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    device_index = 0
    device_type = 1  # CUDA in c10::DeviceType

    def wait_event(self, event: GenericEvent) -> None:
        """Hold later work of this stream until the event's mark of now is reached."""
        event.wait(self)

    def wait_stream(self, stream: GenericStream) -> None:
        """Hold later work of this stream until what is queued on the other one now is done."""
        machine = self.emulation.machine
        with self.emulation.raw():
            machine.wait(self.queue, machine.mark(stream.queue))

    def record_event(self, event: GenericEvent | None = None) -> GenericEvent:
        """Record an event (a new one by default) on this stream."""
        if event is None:
            event = Event() if isinstance(self, Stream) else GenericEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait, as the host, for everything queued so far. Noted, unless nothing is left to do."""
        with self.emulation.raw() if self.queue.done == self.queue.put else nullcontext():
            self.emulation.synchronize(self.queue, "stream.synchronize()")

    def query(self) -> bool:
        """Whether nothing is left to do; like event.query(), it gives in after `patience` questions in a row."""
        machine, queue = self.emulation.machine, self.queue
        with machine.lock, self.emulation.raw():
            if not queue.entries:
                queue.polls, queue.seen = 0, queue.put
                return True
            queue.polls += 1
            if queue.polls <= machine.patience:
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
        """The cudaStream_t as a number: 0 for the default stream only."""
        return self.queue.handle

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Least and greatest priority."""
        return 0, -5


class ExternalStream(Stream):
    """torch.cuda.ExternalStream: the stream that has this handle. ValueError if none has."""

    def __init__(self, stream_ptr: int, device: Any = None, **ids: Any) -> None:
        super().__init__(device, stream_id=stream_ptr)


class StreamContext:
    """torch.cuda.stream(...): makes a stream the thread's current one; None changes nothing."""

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
