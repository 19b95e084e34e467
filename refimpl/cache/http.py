# SPDX-License-Identifier: Apache-2.0
"""Values on a small HTTP server, for tests and demonstrations; it needs no package.

The server is started with `python -m kvconform.refimpl.cache.http PORT`. It listens on the loopback
device only. `POST /clear` makes it forget everything. Started like this, it asks for no secret: any
user of the machine may read and change the values.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import re
import secrets
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit

from pydantic import TypeAdapter, ValidationError

from kvconform.refimpl.cache.backend import Refused, StoreError
from kvconform.refimpl.cache.deadline import Deadline, connect
from kvconform.refimpl.cache.memory import MemoryBackend

NONCE = "X-Store-Nonce"
"""Header of a signed request: a number that no other request has."""
SIGNATURE = "X-Store-Signature"
"""Header of signed requests and responses. It proves that the sender knows the secret."""
LENGTH = re.compile("[0-9]{1,15}")
"""Form of the length of a body."""
KEYS = TypeAdapter(list[str])
"""The body of a response to POST."""


class HttpBackend:
    """A client of the server at `http://[:SECRET@]HOST:PORT`.

    The secret is not sent: requests are signed with it, and so are the responses that count.
    `patience`: seconds until a call fails. ValueError for a URL of another form.
    """

    def __init__(self, url: str, patience: float) -> None:
        parts = urlsplit(url)
        if parts.hostname is None or parts.port is None:
            raise ValueError("the URL of a store has a host and a port: http://HOST:PORT")
        self._place = parts.netloc.rpartition("@")[2]
        self._secret = None if parts.password is None else unquote(parts.password)
        self._patience = patience

    def exists(self, key: str) -> bool:
        return self._call("HEAD", key) is not None

    def get(self, key: str) -> bytes | None:
        return self._call("GET", key)

    def set(self, key: str, value: bytes) -> None:
        self._call("PUT", key, value)

    def list(self, prefix: str = "") -> Iterator[str]:
        body = self._call("POST", prefix) or b"[]"
        try:
            return iter(KEYS.validate_json(body))
        except ValidationError:
            raise StoreError("the server's list of keys is damaged") from None

    def delete(self, key: str) -> None:
        self._call("DELETE", key)

    def close(self) -> None:
        """Nothing stays open."""

    def _call(self, method: str, key: str, value: bytes | None = None) -> bytes | None:
        """Return the body of the response; None if the key has no value."""
        path = f"/values/{quote(key, safe='')}"
        headers: dict[str, str] = {}
        nonce = secrets.token_hex(16)
        if self._secret is not None:
            signature = signed(self._secret, "request", method, path, nonce)
            headers = {NONCE: nonce, SIGNATURE: signature}
        deadline = Deadline()
        deadline.begin(self._patience)
        try:
            with contextlib.closing(http.client.HTTPConnection(self._place)) as link:
                link.sock = connect(link.host, link.port, deadline)
                link.request(method, path, value, headers)
                response = link.getresponse()
                body = response.read()
        except Exception as error:  # a damaged response raises errors of any kind
            raise StoreError(f"the server did not respond: {error}") from error
        if self._secret is not None:
            status = str(response.status)
            expected = signed(self._secret, "response", method, path, nonce, status, body=body)
            if not matches(response.headers.get(SIGNATURE), expected):
                raise StoreError("the response is not from a server that knows the secret")
        if response.status == 404:
            return None
        if response.status != 200:
            raise Refused(f"the server responded with status {response.status}")
        return body


def signed(secret: str, *parts: str, body: bytes = b"") -> str:
    """Return the signature of a message, which needs the secret."""
    message = json.dumps(parts).encode() + body
    return hmac.new(secret.encode(), message, "sha256").hexdigest()


def matches(signature: str | None, expected: str) -> bool:
    """Return whether a signature is the expected one, in a time that does not depend on it."""
    return hmac.compare_digest((signature or "").encode(), expected.encode())


class Handler(BaseHTTPRequestHandler):
    """Handler of the server: GET, HEAD, PUT and DELETE of values, POST for a list or `/clear`.

    With a `secret`, responses are signed, and a request that is not signed gets status 403, and
    does nothing. A request whose body is not complete gets status 400, and does nothing: its client
    was killed.
    """

    protocol_version = "HTTP/1.1"
    values = MemoryBackend("of the server")
    secret: str | None = None

    def parse_request(self) -> bool:
        """Return whether there is a request to handle. A refused one has its response already."""
        if not super().parse_request():
            return False
        refusal = self._refusal()
        if refusal is None:
            return True
        self.close_connection = True  # a part of the body may not have been read
        self._respond(refusal)
        return False

    def _refusal(self) -> int | None:
        """Read the body, and return None; or return the status of a request that is refused."""
        if not self._is_admitted():
            return 403
        length = self.headers.get("Content-Length", "0")
        if not LENGTH.fullmatch(length):
            return 400
        self._body = self.rfile.read(int(length))
        return None if len(self._body) == int(length) else 400

    def _is_admitted(self) -> bool:
        if self.secret is None:
            return True
        expected = signed(self.secret, "request", self.command, self.path, self._nonce())
        return matches(self.headers.get(SIGNATURE), expected)

    def _nonce(self) -> str:
        return self.headers.get(NONCE, "")

    def do_GET(self) -> None:
        value = self.values.get(self._key())
        self._respond(404 if value is None else 200, value or b"")

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.values.set(self._key(), self._body)
        self._respond(200)

    def do_DELETE(self) -> None:
        self.values.delete(self._key())
        self._respond(200)

    def do_POST(self) -> None:
        if self.path != "/clear":
            self._respond(200, json.dumps([*self.values.list(self._key())]).encode())
            return
        for key in self.values.list():
            self.values.delete(key)
        self._respond(200)

    def _key(self) -> str:
        return unquote(self.path.removeprefix("/values/"))

    def _respond(self, status: int, body: bytes = b"") -> None:
        sent = b"" if self.command == "HEAD" else body
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.secret is not None:
            parts = (self.command, self.path, self._nonce(), str(status))
            self.send_header(SIGNATURE, signed(self.secret, "response", *parts, body=sent))
        self.end_headers()
        if sent:
            self.wfile.write(sent)  # also an empty write fails if the client is gone

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
