# SPDX-License-Identifier: Apache-2.0
"""Values on a Redis server, `redis://[:PASSWORD@]HOST:PORT/DATABASE`; needs the package redis."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kvconform.refimpl.cache.backend import MissingPackage, Refused, StoreError
from kvconform.refimpl.cache.deadline import Deadline, Timed

T = TypeVar("T")

PREFIX = "kvconform:"
"""Start of the names on the server, which may have other users."""


class RedisBackend:
    """A client; `patience`: seconds until a call fails. A call is not retried."""

    def __init__(self, url: str, patience: float) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ModuleNotFoundError:
            raise MissingPackage("a store at redis:", "redis") from None
        self._refusal = redis.ResponseError
        self._patience = patience
        self._deadline = Deadline()
        self._server: Any = redis.Redis.from_url(
            url,
            socket_timeout=patience,
            socket_connect_timeout=patience,
            retry=Retry(NoBackoff(), 0),
        )
        pool = self._server.connection_pool
        pool.connection_class = _timed(pool.connection_class, self._deadline)

    def _call(self, call: Callable[[], T]) -> T:
        self._deadline.begin(self._patience)
        try:
            return call()
        except Exception as error:  # a damaged response raises any kind of error in the client
            kind = Refused if isinstance(error, self._refusal) else StoreError
            raise kind(f"Redis: {type(error).__name__}") from error

    def exists(self, key: str) -> bool:
        return self._call(lambda: bool(self._server.exists(PREFIX + key)))

    def get(self, key: str) -> bytes | None:
        return self._call(lambda: _value(self._server.get(PREFIX + key)))

    def set(self, key: str, value: bytes) -> None:
        self._call(lambda: self._server.set(PREFIX + key, value))

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values that there are, in one call."""
        names = [PREFIX + key for key in keys]
        values = self._call(lambda: [_value(value) for value in self._server.mget(names)])
        found = zip(keys, values, strict=False)
        return {key: value for key, value in found if value is not None}

    def set_many(self, values: Mapping[str, bytes]) -> None:
        """Store values, in one call."""
        self._call(
            lambda: self._server.mset({PREFIX + key: value for key, value in values.items()})
        )

    def list(self, prefix: str = "") -> Iterator[str]:
        pattern = re.sub(r"([\\*?\[\]])", r"\\\1", PREFIX + prefix) + "*"
        names = self._call(
            lambda: [name.decode() for name in self._server.scan_iter(match=pattern, count=1000)]
        )
        return iter([name.removeprefix(PREFIX) for name in dict.fromkeys(names)])

    def delete(self, key: str) -> None:
        self._call(lambda: self._server.delete(PREFIX + key))

    def close(self) -> None:
        self._server.close()


def _value(response: Any) -> bytes | None:
    """Return a value in a response. TypeError if it is something else."""
    if response is None or isinstance(response, bytes):
        return response
    raise TypeError("the response is no value")


def _timed(kind: type[Any], deadline: Deadline) -> type[Any]:
    """Return a class of connections like `kind` whose transfers end at the deadline."""

    class Connection(kind):  # type: ignore[misc]
        def _connect(self) -> Timed:
            return Timed(super()._connect(), deadline)

    return Connection
