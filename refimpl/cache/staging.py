# SPDX-License-Identifier: Apache-2.0
"""Double buffering: while one host buffer is emptied, the other one is filled.

A thread does the half that talks to the store, and the caller the half that talks to the paged
cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

T = TypeVar("T")
BUFFERS = 2


class Buffer:
    """Host memory for one batch, which is used again for later ones.

    What is in it is addressed by its place in the batch: (number, layer).
    """

    def __init__(self) -> None:
        self._memory = bytearray()
        self._spans: dict[tuple[int, str], tuple[int, int]] = {}

    def fill(self, parts: Mapping[tuple[int, str], bytes]) -> None:
        """Replace the contents by these parts. The memory grows if it has to."""
        size = sum(map(len, parts.values()))
        if size > len(self._memory):
            self._memory = bytearray(size)
        self._spans = {}
        start = 0
        for place, data in parts.items():
            end = start + len(data)
            self._memory[start:end] = data
            self._spans[place] = (start, end)
            start = end

    def get(self, place: tuple[int, str]) -> bytes | None:
        """Return a copy of one part; None if there is none."""
        if place not in self._spans:
            return None
        start, end = self._spans[place]
        return bytes(self._memory[start:end])


class Staging(Generic[T]):
    """Two buffers and a thread. `T` is a batch. One transfer at a time.

    A transfer that an exception has ended may have left work to the thread. Nothing is filled by
    the caller before that work is done.
    """

    def __init__(self) -> None:
        self._buffers = [Buffer() for _ in range(BUFFERS)]
        self._thread: ThreadPoolExecutor | None = None
        # The work that was submitted last; the thread keeps the order.
        self._last: Future[None] | None = None

    def incoming(
        self, work: Iterable[T], fill: Callable[[T, Buffer], None]
    ) -> Iterator[tuple[T, Buffer]]:
        """Yield each batch with a buffer that the thread has filled.

        The buffer is filled again as soon as the caller asks for the next batch.
        """
        left = iter(work)
        free = deque(self._buffers)
        filling: deque[tuple[T, Buffer, Future[None]]] = deque()

        def fill_the_free() -> None:
            while free:
                for batch in left:
                    buffer = free.popleft()
                    filling.append((batch, buffer, self._submit(fill, batch, buffer)))
                    break
                else:
                    return

        fill_the_free()
        while filling:
            batch, buffer, future = filling.popleft()
            future.result()
            yield batch, buffer
            free.append(buffer)
            fill_the_free()

    def outgoing(
        self, work: Iterable[T], drain: Callable[[T, Buffer], None]
    ) -> Iterator[tuple[T, Buffer]]:
        """Yield each batch with a buffer to fill, which the thread then empties.

        When the iteration is over, all buffers are empty.
        """
        if self._last is not None:
            wait([self._last])
        free = deque(self._buffers)
        draining: deque[tuple[Buffer, Future[None]]] = deque()
        for batch in work:
            if not free:
                buffer, future = draining.popleft()
                future.result()
                free.append(buffer)
            buffer = free.popleft()
            yield batch, buffer
            draining.append((buffer, self._submit(drain, batch, buffer)))
        for _, future in draining:
            future.result()

    def _submit(self, work: Callable[[T, Buffer], None], batch: T, buffer: Buffer) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "staging")
        self._last = self._thread.submit(work, batch, buffer)
        return self._last

    def close(self) -> None:
        """End the thread. May be called twice."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
