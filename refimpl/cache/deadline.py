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

    def left(self) -> float:
        """Return the seconds that are left. TimeoutError if none are."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the call took too long")
        return left

    @contextmanager
    def limits(self, link: socket.socket) -> Iterator[None]:
        """Give a socket no more time than is left. TimeoutError if none is."""
        left = self.left()
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


def connect(host: str, port: int, deadline: Deadline) -> Timed:
    """Connect to the first address of a host that accepts. OSError if none does in time.

    The look-up of the host's name has no limit.
    """
    problem = OSError("the host has no address")
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            link = socket.create_connection((str(address[0]), port), deadline.left())
        except OSError as error:
            problem = error
            continue
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as http.client does
        return Timed(link, deadline)
    raise problem


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
