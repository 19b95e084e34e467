# SPDX-License-Identifier: Apache-2.0
"""Tests of engines that find each other's values."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvconform.refimpl.cache import peers
from kvconform.refimpl.cache.backend import StoreError
from kvconform.refimpl.cache.http import NONCE, SIGNATURE, Handler, HttpBackend, signed
from kvconform.refimpl.cache.memory import MemoryBackend
from kvconform.refimpl.cache.patience import Patient
from kvconform.refimpl.cache.peers import ADDRESSES, Neighbours, Served
from kvconform.refimpl.cache.seal import seal, unseal
from stores import serving

NAMES = ("one", "two", "three")


class Engine:
    """The values of one engine, and its view of all."""

    def __init__(self, name: str, meeting: MemoryBackend) -> None:
        self.own = MemoryBackend()
        self.served = Served(self.own, name, meeting)
        self.all = Neighbours(self.own, name, meeting, patience=20.0)


def address_of(announced: bytes | None, name: str) -> str:
    """Return the address in what an engine has announced."""
    address = unseal(ADDRESSES + name, announced or b"")
    assert address is not None
    return address.decode()


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    before = set(threading.enumerate())
    meeting = MemoryBackend()
    made = [Engine(name, meeting) for name in NAMES]
    yield made
    for engine in made:
        engine.served.close()
        engine.served.close()
    assert not list(meeting.list())
    assert set(threading.enumerate()) <= before


def test_each_finds_what_the_others_have_and_stores_with_itself(engines: list[Engine]) -> None:
    one, two, three = engines
    one.all.set("a/1", b"first")
    three.all.set("b", b"third")
    for engine in engines:
        assert engine.all.exists("a/1") and engine.all.get("a/1") == b"first"
        assert engine.all.get("b") == b"third"
        assert not engine.all.exists("c") and engine.all.get("c") is None
        assert sorted(engine.all.list()) == ["a/1", "b"]
    assert [*two.own.list()] == [] and [*one.own.list()] == ["a/1"]


def test_what_one_deletes_is_gone_everywhere(engines: list[Engine]) -> None:
    for engine in engines:
        engine.all.set("a", b"x")
    engines[1].all.delete("a")
    assert not any(engine.all.exists("a") for engine in engines)


def test_an_engine_that_has_left_has_nothing(engines: list[Engine]) -> None:
    one, two, _ = engines
    one.all.set("a", b"x")
    assert two.all.exists("a")
    one.served.close()
    assert not two.all.exists("a") and two.all.get("a") is None and one.all.get("a") == b"x"


def test_an_engine_that_crashed_costs_one_call(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    call = HttpBackend._call

    def counted(self: HttpBackend, *arguments: Any) -> bytes | None:
        calls[self._place] += 1
        return call(self, *arguments)

    monkeypatch.setattr(HttpBackend, "_call", counted)
    one, two, three = engines
    three.all.set("a", b"x")
    address = one.served._meeting.get("peers/one")
    one.served.close()
    assert address is not None
    one.served._meeting.set("peers/one", address)  # it did not withdraw
    url = address_of(address, "one")
    assert two.all.exists("a") and two.all.get("a") == b"x" and [*two.all.list()] == ["a"]
    [crashed] = [client for known, client in two.all._clients.items() if known == url]
    assert isinstance(crashed, Patient) and crashed.is_silent
    assert calls[url.rpartition("@")[2]] == 1 and len(calls) == 2
    one.served._meeting.delete("peers/one")


@pytest.mark.parametrize("signature", [None, "", "guessed", "\xe4", "of another request"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/values/a"),
        ("HEAD", "/values/a"),
        ("PUT", "/values/a"),
        ("PUT", "/values/b"),
        ("DELETE", "/values/a"),
        ("POST", "/values/"),
        ("POST", "/clear"),
    ],
)
def test_a_request_without_the_secret_does_nothing(
    engines: list[Engine], method: str, path: str, signature: str | None
) -> None:
    one = engines[0]
    one.all.set("a", b"private")
    header = {} if signature is None else {NONCE: "1", SIGNATURE: signature}
    if signature == "of another request":
        secret = str(urlsplit(address_of(one.served._meeting.get("peers/one"), "one")).password)
        header[SIGNATURE] = signed(secret, "request", "GET", "/values/other", "1")
    link = http.client.HTTPConnection("127.0.0.1", one.served._server.server_port, timeout=20)
    link.request(method, path, b"", header)
    response = link.getresponse()
    assert response.status == 403 and response.read() == b""
    link.close()
    assert {key: one.own.get(key) for key in one.own.list()} == {"a": b"private"}


def test_nothing_in_the_body_of_a_refused_request_is_a_request(engines: list[Engine]) -> None:
    place = ("127.0.0.1", engines[0].served._server.server_port)
    with socket.create_connection(place, timeout=20) as client:
        inner = b"GET /values/a HTTP/1.1\r\n\r\n"
        client.sendall(b"PUT /values/a HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner)
        responses = client.makefile("rb").read()
    assert responses.startswith(b"HTTP/1.1 403") and responses.count(b"HTTP/1.1 ") == 1


class Foreign(Handler):
    """A server that answers every request with a value, and knows no secret."""

    seen: list[str] = []
    signature: str | None = None

    def do_GET(self) -> None:
        self.seen.append(f"{self.requestline} {self.headers}")
        self.send_response(200)
        self.send_header("Content-Length", "6")
        if self.signature is not None:
            self.send_header(SIGNATURE, self.signature)
        elif SIGNATURE in self.headers:
            self.send_header(SIGNATURE, self.headers[SIGNATURE])
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else b"forged")

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET


@pytest.mark.parametrize("signature", ["", "guessed", "\xe4", None])
def test_a_process_that_took_the_port_of_an_engine_is_no_peer(
    engines: list[Engine], signature: str | None
) -> None:
    """It learns no secret, and what it responds is not taken. None: the request's signature."""
    one, two, _ = engines
    announced = one.served._meeting.get("peers/one") or b""
    url = urlsplit(address_of(announced, "one"))
    one.served.close()
    one.served._meeting.set("peers/one", announced)  # it was killed
    handler = type("Handler", (Foreign,), {"seen": [], "signature": signature})
    with serving(ThreadingHTTPServer(("127.0.0.1", url.port or 0), handler)):
        assert two.all.get("a") is None
        Patient.silent.clear()
        assert not two.all.exists("a")
        Patient.silent.clear()
        assert [*two.all.list()] == []
        Patient.silent.clear()
        two.all.delete("a")
    one.served._meeting.delete("peers/one")
    assert len(handler.seen) == 4
    assert not any(str(url.password) in request for request in handler.seen)


@pytest.mark.parametrize("changed", [None, 0, 1, 2, 3, 4, "body"])
def test_a_signature_is_that_of_one_response(changed: int | str | None) -> None:
    """A response to another request, with another status or another body, is not taken."""

    class Signing(Handler):
        def do_GET(self) -> None:
            parts = ["response", self.command, self.path, self.headers[NONCE], "200"]
            if isinstance(changed, int):
                parts[changed] = "other"
            self.send_response(200)
            self.send_header(SIGNATURE, signed("secret", *parts, body=b"value"))
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"other" if changed == "body" else b"value")

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Signing)) as port:
        backend = HttpBackend(f"http://:secret@127.0.0.1:{port}", 20)
        if changed is None:
            assert backend.get("k") == b"value"
        else:
            with pytest.raises(StoreError, match="knows the secret"):
                backend.get("k")


def test_each_call_has_a_nonce_of_its_own() -> None:
    handler = type("Handler", (Foreign,), {"seen": []})
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as port:
        for _ in range(2):
            with pytest.raises(StoreError):
                HttpBackend(f"http://:secret@127.0.0.1:{port}", 20).get("k")
    assert len(set(handler.seen)) == 2


def test_each_engine_has_a_secret_of_its_own_that_names_no_server(engines: list[Engine]) -> None:
    one, two, three = engines
    announced = [two.served._meeting.get(ADDRESSES + name) for name in NAMES]
    addresses = map(address_of, announced, NAMES)
    secrets = {str(urlsplit(address).password) for address in addresses}
    assert len(secrets) == 3 and all(len(secret) == 32 for secret in secrets)
    one.served.close()
    three.all.set("a", b"x")
    one.served._meeting.set(ADDRESSES + "one", announced[0] or b"")
    assert two.all.exists("a")
    one.served._meeting.delete(ADDRESSES + "one")
    assert not any(secret in server for server in Patient.silent for secret in secrets)


def test_a_process_that_closes_nothing_ends(engines: list[Engine]) -> None:
    assert all(engine.served._thread.daemon for engine in engines)


def test_closing_waits_for_a_request_under_way() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(MemoryBackend):
        def get(self, key: str) -> bytes | None:
            begun.set()
            goes_on.wait(20)
            return b"value"

    meeting, found = MemoryBackend(), []
    served = Served(Slow(), "one", meeting)
    backend = HttpBackend(address_of(meeting.get("peers/one"), "one"), 20)
    reading = threading.Thread(target=lambda: found.append(backend.get("k")))
    closing = threading.Thread(target=served.close)
    reading.start()
    assert begun.wait(20)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    goes_on.set()
    closing.join()
    reading.join()
    assert found == [b"value"]


def test_an_engine_that_cannot_announce_itself_serves_nothing() -> None:
    class Full(MemoryBackend):
        def set(self, key: str, value: bytes) -> None:
            raise StoreError("full")

    before = set(threading.enumerate())
    with pytest.raises(StoreError, match="full"):
        Served(MemoryBackend(), "one", Full())
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize(
    "address",
    [
        b"",
        b"\x97 is no address",
        b"http://",
        b"http://[::1",
        b"http://127.0.0.1",
        b"http://127.0.0.1:80x",
        b"http://127.0.0.1:99999",
        b"http://a b:80",
        b"http://\x00:80",
        "http://\u2100:80".encode(),
        b"http://" + b"\xc3\xa4" * 70 + b":80",
    ],
)
def test_a_damaged_address_is_no_peer(address: bytes, is_sealed: bool) -> None:
    """The values of other engines are still found."""
    meeting = MemoryBackend()
    one, two = Engine("one", meeting), Engine("two", meeting)
    try:
        for name in ("a", "three"):
            key = ADDRESSES + name
            meeting.set(key, seal(key, address) if is_sealed else address)
        two.all.set("a", b"x")
        assert one.all.exists("a") and one.all.get("a") == b"x" and [*one.all.list()] == ["a"]
        assert not one.all.exists("b") and one.all.get("b") is None
        one.all.delete("a")
        assert not two.all.exists("a")
    finally:
        one.served.close()
        two.served.close()


def test_a_changed_address_is_not_called(engines: list[Engine]) -> None:
    one, two, _ = engines
    one.all.set("a", b"x")
    announced = bytearray(one.served._meeting.get("peers/one") or b"")
    announced[-1] ^= 1  # another port
    one.served._meeting.set("peers/one", bytes(announced))
    assert not two.all.exists("a") and len(two.all._clients) == 1


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "a byte now and then"])
def test_closing_does_not_wait_for_a_slow_client(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "LONGEST", 0.5)
    served = Served(MemoryBackend(), "one", MemoryBackend())
    with socket.create_connection(("127.0.0.1", served._server.server_port)) as client:
        time.sleep(0.1)  # the server has accepted it
        closing = threading.Thread(target=served.close, daemon=True)
        closing.start()
        until = time.monotonic() + 10
        with contextlib.suppress(OSError):  # the server has closed the connection
            while closing.is_alive() and time.monotonic() < until:
                if not is_silent:
                    client.send(b"x")
                time.sleep(0.05)
        closing.join(10)
        assert not closing.is_alive() and time.monotonic() < until
