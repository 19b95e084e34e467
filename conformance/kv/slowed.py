# SPDX-License-Identifier: Apache-2.0
"""Makes streams of a real CUDA device slow: holds them, and releases them when needed.

A held stream goes on when the compute stream or the host waits for it, or when the host has asked
`PATIENCE` times whether it is done, as on the emulated device. The calls of torch.cuda tell which
streams are used, and which waits for which; see `in_use`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch

from kvconform.contract.case import Slow
from kvconform.emulation.patch import Patches
from kvconform.kv.held import Holds, Mark

Method = Callable[..., Any]
PATIENCE = 3
"""How often a stream or an event answers that it is not done; the emulated device has as much."""
MARK = "_kvconform_mark"
"""Attribute of an event: who noted where it was recorded, and the place."""


class Kind(type):
    """Metaclass of a subclass that stands for its base: what is of the base counts as its own."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__base__)  # type: ignore[arg-type]

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__base__)  # type: ignore[arg-type]


def handle_of(stream: Any) -> int:
    """Return the cudaStream_t of a torch.cuda.Stream, or of the torch.Stream of a CUDA device."""
    if not hasattr(stream, "cuda_stream"):
        stream = torch.cuda.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
    return int(stream.cuda_stream)


class Watched:
    """What the calls of torch.cuda say about streams.

    Every method stands for the method of torch that is its first argument, and calls it.
    """

    def __init__(self, holds: Holds, slow: Slow) -> None:
        self._holds, self._slow = holds, slow
        self._compute = handle_of(torch.cuda.current_stream())
        self._asked: Counter[Mark] = Counter()

    def _in_use(self, stream: Any) -> None:
        """Hold a stream that is given work, if transfers are slow."""
        if stream is None or self._slow != "transfers":
            return
        if (handle := handle_of(stream)) != self._compute:
            self._holds.hold(handle)

    def _mark(self, stream: Any) -> Mark:
        """Return the place behind all that a stream has been given."""
        return self._holds.mark(handle_of(stream))

    def _note(self, event: Any, mark: Mark) -> None:
        """Note the place at which an event was recorded."""
        # On the event itself: torch (2.11) does not clear weak references to a torch.cuda.Event
        # when it frees one. The mark means nothing to a later run in this process. A torch.Event
        # that is older than this run takes no attribute; its origin stays unknown.
        with suppress(AttributeError):
            setattr(event, MARK, (self, mark))

    def _noted(self, event: Any) -> Mark | None:
        """Return the place at which an event was recorded, or None."""
        by, mark = getattr(event, MARK, (None, None))
        return mark if by is self else None

    def enter(self, call: Method, this: Any, /) -> Any:
        """See torch.cuda.StreamContext.__enter__."""
        found = call(this)
        self._in_use(this.stream)
        return found

    def set_stream(self, call: Method, /, stream: Any) -> None:
        """See torch.cuda.set_stream."""
        call(stream)
        self._in_use(stream)

    def wait_stream(self, call: Method, this: Any, /, stream: Any) -> None:
        """See torch.cuda.Stream.wait_stream."""
        mark = self._mark(stream)
        call(this, stream)
        self._follow(this, mark)

    def wait_event(self, call: Method, this: Any, /, event: Any) -> None:
        """See torch.cuda.Stream.wait_event."""
        call(this, event)
        self._follow(this, self._noted(event))

    def wait(self, call: Method, this: Any, /, stream: Any = None) -> None:
        """See torch.cuda.Event.wait."""
        stream = torch.cuda.current_stream() if stream is None else stream
        call(this, stream)
        self._follow(stream, self._noted(this))

    def _follow(self, stream: Any, mark: Mark | None) -> None:
        if mark is None:
            self._holds.release()  # an event of unknown origin
        else:
            self._holds.follows(handle_of(stream), mark)
        self._in_use(stream)

    def record(self, call: Method, this: Any, /, stream: Any = None) -> None:
        """See torch.cuda.Event.record."""
        stream = torch.cuda.current_stream() if stream is None else stream
        call(this, stream)
        self._note(this, self._mark(stream))

    def record_event(self, call: Method, this: Any, /, event: Any = None) -> Any:
        """See torch.cuda.Stream.record_event."""
        event = call(this, event)
        self._note(event, self._mark(this))
        return event

    def synchronize_event(self, call: Method, this: Any, /) -> None:
        """See torch.cuda.Event.synchronize."""
        self._holds.release(self._noted(this))
        call(this)

    def synchronize_stream(self, call: Method, this: Any, /) -> None:
        """See torch.cuda.Stream.synchronize."""
        self._holds.release(self._mark(this))
        call(this)

    def synchronize(self, call: Method, /, device: Any = None) -> None:
        """See torch.cuda.synchronize."""
        self._holds.release()
        call(device)

    def query_event(self, call: Method, this: Any, /) -> bool:
        """See torch.cuda.Event.query."""
        return self._answer(call(this), self._noted(this))

    def query_stream(self, call: Method, this: Any, /) -> bool:
        """See torch.cuda.Stream.query."""
        return self._answer(call(this), self._mark(this))

    def _answer(self, done: bool, mark: Mark | None) -> bool:
        """Return the answer; release what was asked for too often."""
        if not done and mark is not None:
            self._asked[mark] += 1
            if self._asked[mark] >= PATIENCE:
                self._holds.release(mark)
        return done


@contextmanager
def in_use(holds: Holds, slow: Slow) -> Iterator[None]:
    """Watch the calls of torch.cuda; if transfers are slow, hold each stream that is used.

    A stream is in use when it is made the current one (torch.cuda.stream or set_stream), or to wait
    (wait_event, wait_stream, Event.wait). Streams that are used in other ways stay fast. Waits and
    questions in other ways than those of torch end with the time limit of a hold.
    """
    watched = Watched(holds, slow)
    stream, event = torch.cuda.Stream, torch.cuda.Event
    of_events: dict[str, Method] = {
        "wait": watched.wait,
        "record": watched.record,
        "synchronize": watched.synchronize_event,
        "query": watched.query_event,
    }
    # The class for any device takes no attributes.
    generic = {
        name: _through(method, getattr(torch.Event, name)) for name, method in of_events.items()
    }
    calls: list[tuple[Any, str, Method]] = [
        (torch.cuda.StreamContext, "__enter__", watched.enter),
        (torch.cuda, "set_stream", watched.set_stream),
        (stream, "wait_stream", watched.wait_stream),
        (stream, "wait_event", watched.wait_event),
        (stream, "record_event", watched.record_event),
        (stream, "synchronize", watched.synchronize_stream),
        (stream, "query", watched.query_stream),
        *((event, name, method) for name, method in of_events.items()),
        (torch.cuda, "synchronize", watched.synchronize),
        (torch.accelerator, "synchronize", watched.synchronize),
    ]
    patches = Patches()
    try:
        for owner, name, method in calls:
            patches.set(owner, name, _through(method, getattr(owner, name)))
        patches.set(torch, "Event", Kind("Event", (torch.Event,), generic))
        yield
    finally:
        patches.restore()


def _through(method: Method, call: Method) -> Method:
    """Return a function in place of `call`, which passes through `method`."""

    @wraps(call)
    def passed(*args: Any, **kwargs: Any) -> Any:
        return method(call, *args, **kwargs)

    return passed
