# SPDX-License-Identifier: Apache-2.0
"""A store in its own process: the server and the client.

The server is started with `python -m kvconform.refimpl.variants.served_store PORT`. For the client,
a server that does not answer is an empty store.
"""

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
"""Time-out of a call, and the pause of all calls after a failed one, in seconds."""


class Handler(BaseHTTPRequestHandler):
    """Handler of the server's two requests.

    `POST /<method>`, with a line of JSON (rank, ranks, arguments) and bytes, calls a method of
    MemoryStore. `POST /clear` forgets everything.
    """

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/clear":
            MemoryStore._named.clear()
            self._answer(b"")
            return
        line, _, data = body.partition(b"\n")
        rank, ranks, arguments = json.loads(line)
        if self.path == "/put":
            arguments.append(data)
        method = getattr(MemoryStore("served", rank, ranks), self.path[1:])
        found = method(*arguments)
        self._answer(found if isinstance(found, bytes) else json.dumps(found).encode())

    def _answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class ServedStore:
    """A `store.Store` at `127.0.0.1:port`.

    After a failed call, no store of this process calls that server for a while.
    """

    patience: ClassVar[float] = PATIENCE
    _silent: ClassVar[dict[int, float]] = {}

    @classmethod
    def is_silent(cls, port: int) -> bool:
        """Return whether the server did not answer a recent call."""
        return time.monotonic() < cls._silent.get(port, 0.0)

    def __init__(self, port: int, rank: int = 0, world: int = 1) -> None:
        self.port = port
        self.place = (rank, world)

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
        return iter(())  # not needed over the network

    def _call(self, method: str, *arguments: Any, data: bytes = b"") -> bytes | None:
        """Return the server's answer; None if there is none."""
        if self.is_silent(self.port):
            return None
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)
        body = json.dumps([*self.place, arguments]).encode() + b"\n" + data
        try:
            link.request("POST", f"/{method}", body)
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
