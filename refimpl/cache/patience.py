# SPDX-License-Identifier: Apache-2.0
"""Limits of the time that a server which does not respond can cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, TypeVar

from kvconform.refimpl.cache.backend import Backend, Refused, StoreError
from kvconform.refimpl.cache.batches import get_many, set_many

T = TypeVar("T")

PATIENCE = 1.0
"""Default time-out of a call, and pause after a call without response, in seconds."""


class Patient:
    """A back end on a server, which this process does not call for a while if it did not respond.

    Without the pause, each hook of the connector would wait for the time-out again. The next
    connector asks again. A server that refuses a call has responded: one that is full can be read.
    """

    silent: ClassVar[dict[str, float]] = {}
    """Until when a server is not called, by its name."""

    def __init__(self, backend: Backend, server: str, patience: float = PATIENCE) -> None:
        self._backend = backend
        self._server = server
        self._patience = patience
        self.silent.pop(server, None)

    @property
    def is_silent(self) -> bool:
        """Whether the server is not called now."""
        return time.monotonic() < self.silent.get(self._server, 0.0)

    def _call(self, call: Callable[[], T]) -> T:
        if self.is_silent:
            raise StoreError("the server did not respond to a recent call")
        try:
            return call()
        except Refused:
            raise
        except StoreError:
            self.silent[self._server] = time.monotonic() + self._patience
            raise

    def exists(self, key: str) -> bool:
        return self._call(lambda: self._backend.exists(key))

    def get(self, key: str) -> bytes | None:
        return self._call(lambda: self._backend.get(key))

    def set(self, key: str, value: bytes) -> None:
        self._call(lambda: self._backend.set(key, value))

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        return self._call(lambda: get_many(self._backend, keys))

    def set_many(self, values: Mapping[str, bytes]) -> None:
        self._call(lambda: set_many(self._backend, values))

    def list(self, prefix: str = "") -> Iterator[str]:
        return iter(self._call(lambda: [*self._backend.list(prefix)]))

    def delete(self, key: str) -> None:
        self._call(lambda: self._backend.delete(key))

    def close(self) -> None:
        self._backend.close()
