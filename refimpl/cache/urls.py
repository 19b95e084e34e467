# SPDX-License-Identifier: Apache-2.0
"""Opens back ends by URL."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit, urlunsplit

from kvconform.refimpl.cache.backend import Backend
from kvconform.refimpl.cache.file import FileBackend
from kvconform.refimpl.cache.http import HttpBackend
from kvconform.refimpl.cache.memory import MemoryBackend
from kvconform.refimpl.cache.patience import PATIENCE, Patient
from kvconform.refimpl.cache.redis_server import RedisBackend
from kvconform.refimpl.cache.s3 import S3Backend

SERVERS: dict[str, Callable[[str, float], Backend]] = {
    "http": HttpBackend,
    "redis": RedisBackend,
    "rediss": RedisBackend,
    "s3": S3Backend,
}
"""Back ends that are servers, by the scheme of their URLs."""
IN_MEMORY = ("pinned", "device")
"""Schemes of back ends in memory of a fixed size."""


def open_backend(url: str, patience: float = PATIENCE) -> Backend:
    """Open `memory:NAME`, `pinned:BYTES`, `device:BYTES`, `file:PATH`, a path, or a server's URL.

    `patience`: seconds until a call of a server fails, and for which it is then not called.
    ValueError for another scheme, or an empty path. MissingPackage if the back end needs a package
    that is missing.
    """
    scheme, colon, rest = url.partition(":")
    if scheme == "memory":
        return MemoryBackend(rest)
    if scheme in IN_MEMORY:
        # Imported here because it imports torch.
        from kvconform.refimpl.cache.arena import ARENAS

        if not rest.isdecimal():
            raise ValueError(f"{url} is no store: {scheme}: needs its size in bytes")
        return ARENAS[scheme](int(rest))
    if scheme == "file":
        return FileBackend(rest.removeprefix("//"))
    if scheme in SERVERS:
        return Patient(SERVERS[scheme](url, patience), server_of(url), patience)
    if colon and "://" in url:
        known = ", ".join(["memory", *IN_MEMORY, "file", *SERVERS])
        raise ValueError(f"unknown store {scheme}://; the known schemes are {known}")
    return FileBackend(url)


def server_of(url: str) -> str:
    """Return what names the server in a URL: scheme, host, port and query, without a password."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], "", parts.query, ""))
