# SPDX-License-Identifier: Apache-2.0
"""A limit of the time that a whole call of a server takes, however slowly its bytes come.

The time-out of a socket is that of one read: a server that sends a byte now and then never
exceeds it.
"""

from __future__ import annotations

import io
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Deadline(threading.local):
    """When the current call of a thread has to end."""

    end = math.inf

    def begin(self, seconds: float) -> None:
        """Start a call that may take this long."""
        self.end = time.monotonic() + seconds

    @contextmanager
    def limits(self, link: socket.socket) -> Iterator[None]:
        """Give a socket no more time than is left. TimeoutError if none is."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the call took too long")
        own = link.gettimeout()
        if own is not None and own <= left:
            yield
            return
        link.settimeout(left)
        try:
            yield
        finally:
            link.settimeout(own)


class Timed:
    """A connected socket whose transfers end at a deadline. Otherwise it is that socket."""

    def __init__(self, link: socket.socket, deadline: Deadline) -> None:
        self._link = link
        self._deadline = deadline

    def recv(self, *arguments: Any) -> bytes:
        with self._deadline.limits(self._link):
            return self._link.recv(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        with self._deadline.limits(self._link):
            return self._link.recv_into(*arguments)

    def sendall(self, *arguments: Any) -> None:
        with self._deadline.limits(self._link):
            self._link.sendall(*arguments)

    def makefile(self, mode: str, size: int = -1) -> io.BufferedReader:
        """Return a file to read from, as http.client and http.server want it."""
        return io.BufferedReader(_Reader(self._link, self._deadline))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


class _Reader(io.RawIOBase):
    """The bytes of a socket, which stays open until this is closed, too."""

    def __init__(self, link: socket.socket, deadline: Deadline) -> None:
        self._link = link
        self._raw = link.makefile("rb", buffering=0)
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        with self._deadline.limits(self._link):
            return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
