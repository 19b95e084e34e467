# SPDX-License-Identifier: Apache-2.0
"""Engines that keep their values themselves, and look for those of others by key (peer to peer).

Every engine serves its values over HTTP on the loopback device, and announces its address in a
directory that all engines know. An engine that does not respond has nothing.

With the address, an engine announces a random secret. Clients and servers prove to each other that
they know it, and do not send it. So only processes that can read the directory can list, read or
change the values, and a process that listens on the port of an engine that was killed has none.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import ThreadingHTTPServer

from kvconform.refimpl.cache.backend import Backend, StoreError
from kvconform.refimpl.cache.deadline import Deadline, Timed
from kvconform.refimpl.cache.http import Handler, HttpBackend
from kvconform.refimpl.cache.memory import MemoryBackend
from kvconform.refimpl.cache.patience import Patient
from kvconform.refimpl.cache.seal import seal, unseal
from kvconform.refimpl.cache.urls import server_of

ADDRESSES = "peers/"
"""Start of the keys of addresses: `peers/ENGINE`."""
LONGEST = 5.0
"""Seconds that a connection may last. Closing waits for requests that are under way."""


class _Brief(Handler):
    """A handler whose connection ends after a time, however slowly its bytes come."""

    def setup(self) -> None:
        deadline = Deadline()
        deadline.begin(LONGEST)
        self.request = Timed(self.request, deadline)
        super().setup()


class Served:
    """The values of one engine, which others can read while it is open.

    StoreError if its address cannot be announced.
    """

    def __init__(self, values: MemoryBackend, engine: str, meeting: Backend) -> None:
        secret = secrets.token_hex(16)
        handler = type("Handler", (_Brief,), {"values": values, "secret": secret})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = False  # so that closing waits for requests under way
        # A daemon: the process ends also if nothing closes this.
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()
        self._key = ADDRESSES + engine
        self._meeting = meeting
        self._is_open = True
        try:
            address = f"http://:{secret}@127.0.0.1:{self._server.server_port}"
            meeting.set(self._key, seal(self._key, address.encode()))
        except StoreError:
            self.close()
            raise

    def close(self) -> None:
        """Withdraw the address, and end the server. May be called twice."""
        if self._is_open:
            self._is_open = False
            with suppress(StoreError):
                self._meeting.delete(self._key)
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


class Neighbours:
    """A back end that stores in `own`, and also finds what other engines have.

    `meeting`: where engines announce their addresses.
    """

    def __init__(self, own: Backend, engine: str, meeting: Backend, patience: float) -> None:
        self._own = own
        self._key = ADDRESSES + engine
        self._meeting = meeting
        self._patience = patience
        self._clients: dict[str, Backend] = {}

    def peers(self) -> Iterator[Backend]:
        """Yield a client of each other engine that is announced."""
        with suppress(StoreError):
            for key in sorted(self._meeting.list(ADDRESSES)):
                address = unseal(key, self._meeting.get(key) or b"")
                if key != self._key and address is not None:
                    with suppress(ValueError):  # it is no address
                        client = self._client(address.decode())
                        yield client

    def _client(self, url: str) -> Backend:
        if url not in self._clients:
            client = HttpBackend(url, self._patience)
            self._clients[url] = Patient(client, server_of(url), self._patience)
        return self._clients[url]

    def exists(self, key: str) -> bool:
        return self._own.exists(key) or any(_has(peer, key) for peer in self.peers())

    def get(self, key: str) -> bytes | None:
        value = self._own.get(key)
        for peer in self.peers() if value is None else ():
            with suppress(StoreError):
                value = peer.get(key)
            if value is not None:
                break
        return value

    def set(self, key: str, value: bytes) -> None:
        self._own.set(key, value)

    def list(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys of all engines."""
        found = dict.fromkeys(self._own.list(prefix))
        for peer in self.peers():
            with suppress(StoreError):
                found |= dict.fromkeys(peer.list(prefix))
        return iter(found)

    def delete(self, key: str) -> None:
        """Remove a value from every engine."""
        self._own.delete(key)
        for peer in self.peers():
            with suppress(StoreError):
                peer.delete(key)

    def close(self) -> None:
        """Close the connections to the other engines, too."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._own.close()


def _has(peer: Backend, key: str) -> bool:
    with suppress(StoreError):
        return peer.exists(key)
    return False
