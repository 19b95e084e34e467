# SPDX-License-Identifier: Apache-2.0
"""A store in a process of its own: its server (`python -m kvconform.refimpl.variants.served_store PORT`), and the client, for which a
server that does not answer is an empty store."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from kvconform.refimpl.store import MemoryStore

PATIENCE = 1.0
"""Seconds that an answer may take, and seconds after one that never came in which nothing is asked."""


class Handler(BaseHTTPRequestHandler):
    """`POST /<method>` with a line of JSON (rank, ranks, arguments) and bytes: a call of MemoryStore. `POST /clear`: all is forgotten."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/clear":
            MemoryStore._named.clear()
            self._answer(b"")
            return
        line, _, data = body.partition(b"\n")
        rank, ranks, arguments = json.loads(line)
        found = getattr(MemoryStore("served", rank, ranks), self.path[1:])(
            *arguments, *([data] if self.path == "/put" else [])
        )
        self._answer(found if isinstance(found, bytes) else json.dumps(found).encode())

    def _answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing of a call is worth a line."""


class ServedStore:
    """A `store.Store` at `127.0.0.1:port`. One that has not answered is left alone for a while, by all of a process."""

    patience: ClassVar[float] = PATIENCE
    _silent: ClassVar[dict[int, float]] = {}

    @classmethod
    def is_silent(cls, port: int) -> bool:
        """Whether it did not answer just now."""
        return time.monotonic() < cls._silent.get(port, 0.0)

    def __init__(self, port: int, rank: int = 0, world: int = 1) -> None:
        self.port, self.place = port, (rank, world)

    def epoch(self) -> int:
        return int(self._call("epoch") or 0)

    def reset(self) -> None:
        self._call("reset")

    def put(self, epoch: int, key: str, layer: str, data: bytes) -> None:
        self._call("put", epoch, key, layer, data=data)

    def commit(self, epoch: int, key: str) -> None:
        self._call("commit", epoch, key)

    def has(self, key: str) -> bool:
        return self._call("has", key) == b"true"

    def get(self, key: str, layer: str) -> bytes | None:
        found = self._call("get", key, layer)
        return None if found == b"null" else found

    def drop(self, key: str) -> None:
        self._call("drop", key)

    def keys(self) -> Iterator[str]:
        return iter(())  # nobody asks over the network

    def _call(self, method: str, *arguments: Any, data: bytes = b"") -> bytes | None:
        """The server's answer; None if there is none."""
        if self.is_silent(self.port):
            return None
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)
        try:
            link.request(
                "POST", f"/{method}", json.dumps([*self.place, arguments]).encode() + b"\n" + data
            )
            answer = link.getresponse()
            found = answer.read()
            return found if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            self._silent[self.port] = time.monotonic() + PATIENCE
            return None
        finally:
            link.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
