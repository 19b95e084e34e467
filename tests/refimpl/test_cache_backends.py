# SPDX-License-Identifier: Apache-2.0
"""Tests of the stores behind the reference connector: each back end, and what stores do wrong."""

from __future__ import annotations

import os
import resource
import signal
import socket
import socketserver
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from kvconform.config.target import Target
from kvconform.contract.loader import load_spec
from kvconform.errors import UsageError
from kvconform.process.servers import Servers
from kvconform.refimpl.cache import s3, urls
from kvconform.refimpl.cache.backend import MissingPackage, Refused, StoreError
from kvconform.refimpl.cache.chunks import EPOCH, VALUES, ChunkStore, chunk_of, open_store
from kvconform.refimpl.cache.file import FileBackend
from kvconform.refimpl.cache.holds import Holds
from kvconform.refimpl.cache.http import Handler, HttpBackend
from kvconform.refimpl.cache.memory import MemoryBackend
from kvconform.refimpl.cache.patience import Patient
from kvconform.refimpl.cache.seal import packed, seal, unpacked, unseal
from kvconform.refimpl.cache.tiers import Level, Tiers
from kvconform.refimpl.cache.urls import open_backend
from kvconform.run import smoke
from kvconform.run.case import run_and_judge
from kvconform.run.runner import run_variant
from stores import KINDS, SERVED, served, serving, skip_without, url_of
from warm_rig import wait_for

SPEC = load_spec()
BUSY, SHORT = 20.0, 3.0
"""Seconds of patience: for servers on a busy machine, and for one that does not respond."""
KEYS = ("chunks/0/k/0", "chunks/0/k/1", "a b/../ä*[?]", "x", "x/y", ".", "..", "a//b", "%2E", "%")
"""Also keys that would lead out of the store if they were paths or patterns."""


@pytest.fixture(scope="module", params=KINDS)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A store of each kind; its server runs while the tests of this kind do."""
    with (
        pytest.MonkeyPatch.context() as patch,
        url_of(request.param, tmp_path_factory.mktemp(request.param), patch) as found,
    ):
        yield found


@pytest.fixture
def url(opened: str) -> str:
    """An empty store of each kind."""
    backend = open_backend(opened, BUSY)
    for key in [*backend.list()]:
        backend.delete(key)
    return opened


@pytest.fixture(autouse=True)
def _forget_failures() -> Iterator[None]:
    Patient.silent.clear()
    yield
    Patient.silent.clear()


# -- every back end


def test_values_come_back_by_key(url: str, tmp_path: Path) -> None:
    backend = open_backend(url, BUSY)
    assert [*backend.list()] == [] and not backend.exists("x") and backend.get("x") is None
    backend.delete("x")
    for key in KEYS:
        backend.set(key, key.encode() * 3 + b"\0\xff")
    again = open_backend(url, BUSY)
    assert all(again.exists(key) and again.get(key) == key.encode() * 3 + b"\0\xff" for key in KEYS)
    assert sorted(again.list()) == sorted(KEYS)
    assert sorted(again.list("chunks/0/")) == ["chunks/0/k/0", "chunks/0/k/1"]
    assert sorted(again.list("a b/../ä*")) == ["a b/../ä*[?]"]
    backend.set("x", b"")
    assert again.get("x") == b"" and again.get("x/y") == b"x/yx/yx/y\0\xff"
    for key in KEYS:
        backend.delete(key)
    assert [*again.list()] == []
    backend.close()
    backend.close()


def test_a_chunk_store_works_over_every_back_end(url: str) -> None:
    ranks = [open_store(url, rank, 2, BUSY) for rank in range(2)]
    for store in ranks:
        store.put(0, "k", "layer/0", b"zero")
        store.put(0, "k", "layer/1", bytes(range(256)))
        assert not ranks[0].has("k")
        store.commit(0, "k")
    assert ranks[1].has("k") and ranks[0].get("k", "layer/1") == bytes(range(256))
    assert ranks[0].reset()
    assert not ranks[1].has("k") and ranks[1].epoch() == 1 and [*ranks[1].keys()] == []
    assert [*ranks[0].backend.list("chunks/")] == []


# -- tenants


def test_a_value_is_served_under_its_own_key_only(url: str) -> None:
    """One tenant's value, moved to the key of another, is no value."""
    store = open_store(url, patience=BUSY)
    store.put(0, "of-tenant-1", "layer", b"secret")
    store.commit(0, "of-tenant-1")
    theirs, mine = (store._name(0, f"of-tenant-{number}", 0) for number in (1, 2))
    stolen = store.backend.get(theirs)
    assert stolen is not None and b"secret" in stolen
    store.backend.set(mine, stolen)
    assert store.has("of-tenant-2") and store.get("of-tenant-2", "layer") is None


@pytest.mark.parametrize("key", ["../outside", "..", "/etc/passwd", "a/../../outside", "~root"])
def test_no_key_leads_out_of_the_directory(tmp_path: Path, key: str) -> None:
    backend = FileBackend(str(tmp_path / "store"))
    backend.set(key, b"value")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 1 and (tmp_path / "store") in files[0].resolve().parents


def test_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        FileBackend(str(tmp_path / "new" / "store")).set("a/b", b"value")
    finally:
        os.umask(before)
    found = {
        str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.rglob("*")
    }
    assert found == {
        "new": 0o700,
        "new/store": 0o700,
        "new/store/a": 0o700,
        "new/store/a/b.kv": 0o600,
    }


@pytest.mark.parametrize("end", ["", "/", "//", "/."])
def test_the_directory_of_the_store_stays(end: str, tmp_path: Path) -> None:
    """Also if it is empty. `delete` removes what it has made itself."""
    root = tmp_path / "above" / "store"
    root.mkdir(parents=True)
    backend = open_backend(f"file:{root}{end}")
    backend.set("a/b/c", b"value")
    assert [*backend.list("a/")] == ["a/b/c"]
    backend.delete("a/b/c")
    assert root.is_dir() and [*root.iterdir()] == []


def test_a_relative_path_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    backend = open_backend("store")
    monkeypatch.chdir("/")
    backend.set("a", b"value")
    assert (tmp_path / "store" / "a.kv").is_file()


@pytest.mark.parametrize("url", ["", "file:", "file://"])
def test_an_empty_path_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="path of a store is empty"):
        open_backend(url)


@pytest.mark.parametrize("times", [1, 5, 1000])
def test_a_directory_that_others_remove_is_made_again(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals = iter(range(times))
    mkdir = os.mkdir

    def make_and_remove(path: str, mode: int) -> None:
        mkdir(path, mode)
        if next(removals, None) is not None:
            os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", make_and_remove)
    backend = FileBackend(str(tmp_path))
    if times < 1000:
        backend.set("a/b", b"value")
        assert backend.get("a/b") == b"value"
    else:
        with pytest.raises(StoreError, match="removed again and again"):
            backend.set("a/b", b"value")


def test_a_directory_that_cannot_be_made_is_a_failing_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports for `/proc/a` that its parent is missing, which is there."""
    mkdir = os.mkdir

    def refuse(path: str, mode: int) -> None:
        if path == str(tmp_path / "a"):
            raise FileNotFoundError
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(StoreError):
        FileBackend(str(tmp_path)).set("a/b", b"value")


def test_two_writers_of_a_key_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, partials = os.replace, []
    both = threading.Barrier(2, timeout=BUSY)

    def replace_together(partial: str, path: str) -> None:
        partials.append(partial)
        both.wait()
        replace(partial, path)

    monkeypatch.setattr(os, "replace", replace_together)
    backend = FileBackend(str(tmp_path))
    writers = [threading.Thread(target=backend.set, args=("k", b"value")) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(set(partials)) == 2 and backend.get("k") == b"value"


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A link in the place of a partial file is an error once, and is gone then."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"another file")
    backend = FileBackend(str(tmp_path / "store"))
    backend.set("k", b"old")
    partial = f"k.kv.{os.getpid()}.{threading.get_ident()}.partial"
    (tmp_path / "store" / partial).symlink_to(outside)
    with pytest.raises(StoreError):
        backend.set("k", b"value")
    assert outside.read_bytes() == b"another file" and backend.get("k") == b"old"
    backend.set("k", b"value")
    assert backend.get("k") == b"value"


# -- damage


def test_only_what_was_sealed_is_unsealed() -> None:
    data = packed({"layer": b"bytes", "other": b""})
    stored = seal("key", data)
    assert unpacked(unseal("key", stored) or b"") == {"layer": b"bytes", "other": b""}
    assert unseal("other", stored) is None
    for length in range(len(stored)):
        assert unseal("key", stored[:length]) is None
    for place in range(len(stored)):
        flipped = bytearray(stored)
        flipped[place] ^= 1
        assert unseal("key", bytes(flipped)) is None
    assert unseal("key", stored + b"\0") is None
    assert unpacked(b"no safetensors") == {}


def test_tensors_of_another_type_are_damaged() -> None:
    """Also those of a type that numpy does not have."""
    for dtype in (torch.bfloat16, torch.float16):
        assert unpacked(save({"layer": torch.zeros(2, dtype=dtype)})) == {}


def test_nothing_is_unpickled() -> None:
    """The modules that read stores import nothing that executes what it reads."""
    folder = Path(urls.__file__).parent
    for path in folder.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not [
            word for word in ("import pickle", "torch.load", "eval(", "marshal") if word in text
        ]


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"garbage",
        seal("another key", b"7"),
        seal(EPOCH, b"")[:9],
        seal(EPOCH, b""),
        seal(EPOCH, b"no number"),
        seal(EPOCH, b"9" * 5000),
    ],
)
def test_a_damaged_number_of_resets_hides_everything(damaged: bytes) -> None:
    """Which chunks are from before a reset is unknown: none is served, until the next reset."""
    store = ChunkStore(MemoryBackend())
    store.put(0, "k", "layer", b"data")
    store.commit(0, "k")
    store.backend.set(EPOCH, damaged)
    assert not store.has("k") and [*store.keys()] == []
    assert store.reset() and store.epoch() == 1


def test_a_lost_number_of_resets_is_stored_again() -> None:
    """Otherwise a chunk that the reset could not remove would come back."""
    store = ChunkStore(Failing())
    store.put(0, "k", "layer", b"from before the reset")
    store.commit(0, "k")
    store.backend.fails = ("delete",)  # type: ignore[attr-defined]
    assert store.reset()
    store.backend.fails = ()  # type: ignore[attr-defined]
    store.backend.delete(EPOCH)
    assert not store.has("k") and store.epoch() == 1
    assert ChunkStore(store.backend).epoch() == 1


@pytest.mark.parametrize("is_tiered", [False, True])
@pytest.mark.parametrize(
    "foreign",
    ["", "zero", "zero/k/0", "-/k/0", "\u0663x/k/0", "0", "0/", "0/k", f"{'9' * 5000}/k/0"],
    ids=lambda key: key[:9],
)
def test_a_key_of_another_user_is_no_chunk(foreign: str, is_tiered: bool) -> None:
    """Such keys are not in the way of a reset, nor of eviction."""
    values = MemoryBackend()
    values.set(VALUES + foreign, b"theirs")
    values.set(f"{VALUES}4/old/0", b"of an earlier epoch")
    held = Holds()
    tiers = Tiers([Level("host", values, 2)], lambda key: chunk_of(key) in held, VALUES)
    store = ChunkStore(tiers if is_tiered else values)
    assert not store.has("k") and [*store.keys()] == []
    assert store.reset() and store.epoch() == 5
    values.set(VALUES + foreign, b"theirs again")
    store.put(5, "k", "layer", b"data")
    store.commit(5, "k")
    assert store.get("k", "layer") == b"data"


# -- back ends that fail


class Failing(MemoryBackend):
    """Raises in every method whose name is in `fails`."""

    fails: tuple[str, ...] = ()

    def __getattribute__(self, name: str) -> object:
        if name in object.__getattribute__(self, "fails"):
            raise StoreError(f"{name} fails")
        return super().__getattribute__(name)


@pytest.mark.parametrize("fails", ["exists", "get", "set", "list", "delete"])
def test_a_failing_back_end_is_a_store_that_finds_less(fails: str) -> None:
    store = ChunkStore(Failing())
    store.put(0, "good", "layer", b"data")
    store.commit(0, "good")
    store.backend.fails = (fails,)  # type: ignore[attr-defined]
    store.put(0, "k", "layer", b"data")
    store.commit(0, "k")
    assert store.get("good", "layer") == (None if fails in ("exists", "get") else b"data")
    store.drop("good")
    assert store.reset() == (fails in ("exists", "get", "delete"))
    assert [*store.keys()] == []
    store.backend.fails = ()  # type: ignore[attr-defined]
    assert store.has("k") == (fails == "list")
    assert store.lost == (fails == "set")


def test_a_full_disk_and_a_read_only_directory_lose_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path / "store"))
    store.put(0, "k", "layer", b"old")
    store.commit(0, "k")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # a write ends in its middle
        store.put(0, "big", "layer", bytes(1000))
        store.commit(0, "big")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not store.has("big") and store.lost == 1
    assert [path for path in tmp_path.rglob("*.partial")] == []

    def refuse(*_: object, **__: object) -> int:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        for name in ("mkdir", "replace", "unlink"):
            patched.setattr(os, name, refuse)
        store.put(0, "new", "layer", b"data")
        store.commit(0, "new")
        assert not store.reset()  # refused, so what was stored may still be served
        assert store.get("k", "layer") == b"old"
    assert not store.has("new") and store.lost == 2


KILLED = """
import os, sys
from kvconform.refimpl.cache.file import FileBackend
backend, replace = FileBackend(sys.argv[1]), os.replace
def stop(*paths):
    print("ready", flush=True)
    sys.stdin.read()
backend.set("chunks/0/good/0", b"value")
os.replace = stop
backend.set("chunks/0/half/0", b"value" * 1000)
"""


def test_a_writer_that_is_killed_leaves_no_value(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
    writer.kill()
    writer.communicate()
    assert [path.name for path in tmp_path.rglob("*.partial")]
    backend = FileBackend(str(tmp_path))
    assert [*backend.list()] == ["chunks/0/good/0"]
    assert not backend.exists("chunks/0/half/0") and backend.get("chunks/0/half/0") is None
    backend.set("chunks/0/half/0", b"again")
    assert backend.get("chunks/0/half/0") == b"again"


# -- servers


@pytest.mark.parametrize("kind", SERVED)
def test_a_server_that_is_slow_or_gone_costs_one_time_out(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(kind, tmp_path, monkeypatch) as settings:
        servers = Servers.active[-1]
        name = settings.servers[0].name
        url = str(settings.extra_config["store"])
        store = open_store(url, patience=BUSY)
        store.put(0, "k", "layer", b"data")
        store.commit(0, "k")
        assert store.get("k", "layer") == b"data"
        short = open_store(url, patience=SHORT)
        servers.freeze(name)
        began = time.monotonic()
        for _ in range(50):
            assert not short.has("k") and short.get("k", "layer") is None
        short.put(0, "lost", "layer", b"data")
        short.commit(0, "lost")
        assert short.lost == 1 and time.monotonic() - began < 10 * SHORT
        servers.thaw(name)
        Patient.silent.clear()
        assert store.get("k", "layer") == b"data" and not store.has("lost")
        servers.restart(name)  # without its data
        Patient.silent.clear()
        store.discard()
        assert not store.has("k") and store.get("k", "layer") is None
        store.put(store.epoch(), "k", "layer", b"again")
        store.commit(store.epoch(), "k")
        assert store.get("k", "layer") == b"again"


@contextmanager
def responding(response: bytes, slow_from: int | None = None) -> Iterator[int]:
    """Yield the port of a server that gives every request this response.

    What is behind the first `slow_from` bytes comes byte by byte, 20 in a second.
    """
    ended = threading.Event()
    first = len(response) if slow_from is None else slow_from

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                while self.request.recv(4096):
                    self.request.sendall(response[:first])
                    for place in range(first, len(response)):
                        if ended.wait(0.05):
                            return
                        self.request.sendall(response[place : place + 1])

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    with serving(server) as port:
        try:
            yield port
        finally:
            ended.set()


@pytest.mark.parametrize(
    "length", ["1000", "-1", "many", "9" * 5000, ""], ids=lambda text: text[:5]
)
def test_a_body_that_is_cut_replaces_no_value(length: str) -> None:
    """Its client was killed in the middle of the request. Nothing in the body is a request."""
    values = MemoryBackend()
    values.set("k", b"sound")
    handler = type("Handler", (Handler,), {"values": values})
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=BUSY) as client:
            head = f"PUT /values/k HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"
            client.sendall(head.encode() + b"GET /values/k HTTP/1.1\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
            responses = client.makefile("rb").read()
        assert responses.startswith(b"HTTP/1.1 400") and responses.count(b"HTTP/1.1 ") == 1
        assert HttpBackend(f"http://127.0.0.1:{port}", BUSY).get("k") == b"sound"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
DRIPS = {
    "http-head": ("http://127.0.0.1:{port}", b"HTTP/1.1 200 OK\r\nX: " + bytes(1000), 0),
    "http-body": ("http://127.0.0.1:{port}", HEAD % 1000 + bytes(1000), len(HEAD)),
    "redis": ("redis://127.0.0.1:{port}/0", b"$1000\r\n" + bytes(1000), 0),
}


@pytest.mark.parametrize("kind", DRIPS)
@pytest.mark.parametrize("call", ["get", "list"])
def test_a_server_that_drips_costs_one_time_out(kind: str, call: str) -> None:
    """The time-out is that of the whole call, not of each read."""
    url, response, slow_from = DRIPS[kind]
    skip_without(kind)
    with responding(response, slow_from) as port:
        backend = open_backend(url.format(port=port), 1.0)
        began = time.monotonic()
        with pytest.raises(StoreError):
            getattr(backend, call)("k")
        assert time.monotonic() - began < 10  # all bytes would take 50 s
        backend.close()


def test_a_host_with_many_addresses_costs_one_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    resolve = socket.getaddrinfo

    def find(host: str, *arguments: Any, **options: Any) -> list[Any]:
        found = resolve("127.0.0.1" if host == "many" else host, *arguments, **options)
        return found * 5 if host == "many" else found

    def wait(link: socket.socket, address: object) -> None:
        calls.append(address)
        time.sleep((link.gettimeout() or 0.0) + 0.01)
        raise TimeoutError

    monkeypatch.setattr(socket, "getaddrinfo", find)
    monkeypatch.setattr(socket.socket, "connect", wait)
    with pytest.raises(StoreError):
        open_backend("http://many:1", 0.1).get("k")
    assert calls == [("127.0.0.1", 1)]


def test_a_call_has_the_time_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier call of a connection took is not missing later."""
    with url_of("redis", tmp_path, monkeypatch) as url:
        backend = open_backend(url, SHORT)
        for _ in range(2):
            backend.set("k", b"value")
            time.sleep(0.6 * SHORT)
            assert backend.get("k") == b"value"
        backend.close()


@pytest.mark.parametrize(
    "body",
    [b"", b"[", b'["chunks/0/k/0", "chu', b"{}", b"7", b"[7]", b"\xff", b"[" * 100_000],
)
def test_a_damaged_list_of_keys_is_a_failing_store(body: bytes) -> None:
    with responding(HEAD % len(body) + body) as port:
        store = open_store(f"http://127.0.0.1:{port}", patience=BUSY)
        if body:
            with pytest.raises(StoreError, match="list of keys is damaged"):
                store.backend.list("")
            Patient.silent.clear()
            assert not store.reset()
        Patient.silent.clear()
        assert [*store.keys()] == []


SIZE = b"<ListBucketResult><Contents><Key>k</Key><Size>x</Size></Contents></ListBucketResult>"
DAMAGED = {
    "http": [
        b"HTTP/1.1 2",
        b"garbage",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD % 10**30,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 20 + b"\r\n",
    ],
    "s3": [
        b"garbage",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nLast-Modified: never\r\n\r\n",
        HEAD % len(SIZE) + SIZE,
    ],
    "redis": [
        b"garbage",
        b"$x\r\n",
        b"*-3\r\n",
        b":x\r\n",
        b"+OK\r\n",
        b":7\r\n",
        b"*1\r\n$1\r\nx\r\n",
    ],
}


@pytest.mark.parametrize(
    ("kind", "response"), [(kind, response) for kind in DAMAGED for response in DAMAGED[kind]]
)
@pytest.mark.parametrize("query", ["", "?protocol=2"])
def test_a_damaged_response_is_a_failing_store(
    kind: str, response: bytes, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the older protocol, the client of Redis does not ask for the server's version first."""
    skip_without(kind)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    with responding(response) as port:
        place = f"{kind}://127.0.0.1:{port}/0{query}"
        if kind == "s3":
            place = f"s3://bucket?endpoint=http://127.0.0.1:{port}"
        store = open_store(place, patience=0.2)
        for call in (store.backend.get, store.backend.exists, store.backend.list):
            Patient.silent.clear()
            with suppress(StoreError):
                call("k")
        Patient.silent.clear()
        assert store.get("k", "layer") is None
        store.discard()
        assert [*store.read_many(["k", "l"])] == [{}, {}] and [*store.keys()] == []
        store.put(0, "k", "layer", b"data")
        store.commit(0, "k")
        store.reset()


REFUSALS = {
    "http": b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 0\r\n\r\n",
    "redis": b"-READONLY You can't write against a read only replica.\r\n",
    "s3": b"HTTP/1.1 403 Forbidden\r\nContent-Length: 51\r\n\r\n"
    b"<Error><Code>AccessDenied</Code><Message/> </Error>",
}


@pytest.mark.parametrize("kind", SERVED)
def test_a_server_that_refuses_a_call_is_still_called(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full or read-only server can be read."""
    skip_without(kind)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    with responding(REFUSALS[kind]) as port:
        place = {"s3": f"s3://bucket?endpoint=http://127.0.0.1:{port}"}.get(
            kind, f"{kind}://127.0.0.1:{port}"
        )
        backend = open_backend(place, BUSY)
        assert isinstance(backend, Patient)
        for _ in range(2):
            with pytest.raises(Refused):
                backend.set("k", b"value")
        assert not backend.is_silent
        backend.close()


def test_redis_that_is_full_loses_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with url_of("redis", tmp_path, monkeypatch) as url:
        store = open_store(url, patience=BUSY)
        store.put(0, "k", "layer", b"data")
        store.commit(0, "k")
        import redis

        server = redis.Redis.from_url(url)
        server.config_set("maxmemory", "1mb")
        server.config_set("maxmemory-policy", "noeviction")
        for number in range(3):
            store.put(0, f"big{number}", "layer", bytes(600_000))
            store.commit(0, f"big{number}")
        assert store.lost >= 1 and store.get("k", "layer") == b"data"


def _answers(client: Any) -> bool:
    """Return whether Redis has read its data: it accepts connections before."""
    import redis

    with suppress(redis.exceptions.RedisError):
        return bool(client.ping())
    return False


def test_redis_has_what_it_has_written_to_its_disk_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with url_of("redis", tmp_path, monkeypatch) as url:
        import redis

        servers = Servers.active[-1]
        store = open_store(url, patience=BUSY)
        for key in ("kept", "lost"):
            store.put(0, key, "layer", b"data")
            store.commit(0, key)
            if key == "kept":
                redis.Redis.from_url(url).save()
        servers.restart("redis")
        client = redis.Redis.from_url(url)
        wait_for(lambda: _answers(client))
        Patient.silent.clear()
        for again in (store, open_store(url, patience=BUSY)):
            again.discard()
            assert again.get("kept", "layer") == b"data"
            assert not again.has("lost") and again.get("lost", "layer") is None
        store.put(0, "lost", "layer", b"again")
        store.commit(0, "lost")
        assert store.get("lost", "layer") == b"again"


def test_a_pause_after_a_failure_is_not_shared_by_other_servers() -> None:
    bad, good = Patient(Failing(), "a"), Patient(MemoryBackend(), "b")
    bad._backend.fails = ("get",)  # type: ignore[attr-defined]
    with pytest.raises(StoreError):
        bad.get("k")
    assert bad.is_silent and not good.is_silent and good.get("k") is None


# -- URLs


def test_unknown_schemes_and_missing_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"unknown store ftp://; the known schemes are memory, pinned"
    ):
        open_backend("ftp://somewhere")
    s3._session.cache_clear()
    for package, url in (("redis", "redis://127.0.0.1:1/0"), ("boto3", "s3://bucket")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(
            MissingPackage, match=f"needs the package {package}.*kvconform\\[stores\\]"
        ):
            open_backend(url)


@pytest.mark.parametrize(
    ("missing", "options"),
    [("redis", {"store": "redis://127.0.0.1:1/0"}), ("boto3", {"store": "s3://bucket"})],
)
def test_a_run_without_the_package_is_refused(
    missing: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no fault of the harness."""
    s3._session.cache_clear()
    monkeypatch.setitem(sys.modules, missing, None)
    target = Target("kvconform.refimpl.connector:ReferenceConnector", options)
    with pytest.raises(UsageError, match=f"package {missing}, which .* \\(pip install 'kvconform"):
        smoke.check(target, tmp_path, BUSY)


def test_passwords_name_no_server() -> None:
    assert urls.server_of("redis://:secret@host:1/0") == "redis://host:1"


# -- connectors over them

RUNS = (
    "cache.pressure[vllm-async-v1-d2-b4]",
    "cache.demoted[reference-sync-v1-d1-b4]",
    "identity.two-salts[vllm-async-v1-d2-b4]",
    "lifecycle.fail-recompute[reference-sync-v1-d1-b4]",
    "lifecycle.reset-connector[vllm-sync-v1-d1-b4]",
    "placeholders.conversation[reference-async-v1-d2-b4]",
    "preemption.after-load[vllm-async-v1-d2-b4]",
    "ranks.tensor[vllm-async-v1-d2-b4]",
    "transfer.one-store[reference-sync-v1-d1-b4]",
)
OVER = [*SERVED, "tiers"]
QUICK = [kind for kind in OVER if kind != "s3"]  # whose server is written in Python


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        *((kind, False) for kind in QUICK),
        *(pytest.param(kind, True, marks=pytest.mark.long) for kind in OVER),
    ],
)
def test_a_connector_over_a_server_fails_nothing(
    kind: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these runs is made with one kind of store, and every night with all kinds."""
    runs = RUNS if whole else RUNS[QUICK.index(kind) :: len(QUICK)]
    passed = 0
    with served(kind, tmp_path, monkeypatch) as settings:
        target = smoke.target_of(settings)
        for number, run in enumerate(runs):
            (variant,) = (v for v in SPEC.cases[run.split("[")[0]].variants() if v.id == run)
            report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / str(number))
            assert report.harness_error is None
            bad = [row for row in report.rows if row.verdict in ("FAIL", "ERROR", "BLOCKED")]
            bad = [row for row in bad if row.kind == "requirement"]
            assert [f"{run}: {row.requirement}: {row.message}" for row in bad] == []
            passed += sum(row.verdict == "PASS" for row in report.rows)
    assert passed > 15 * len(runs), "little was judged"


@pytest.mark.parametrize("kind", ["redis", pytest.param("tiers", marks=pytest.mark.long)])
def test_a_server_that_dies_between_lookup_and_load_costs_no_wrong_token(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(kind, tmp_path, monkeypatch) as settings:
        target: Target = smoke.target_of(settings)
        variant = SPEC.cases["lifecycle.damage-servers"].variants(["vllm"])[0]
        report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "case")
        assert report.harness_error is None
        bad = [row for row in report.rows if row.verdict in ("FAIL", "ERROR")]
        assert [row.message for row in bad if row.kind == "requirement"] == []


@pytest.mark.parametrize(
    ("cut_off", "is_there"),
    [
        ("", True),
        ("one", False),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("", False), ("one", True), ("two", False), ("two", True))
        ),
    ],
)
def test_a_store_that_one_of_two_engines_cannot_reach_costs_no_wrong_token(
    cut_off: str, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cut_off`: that engine. `is_there`: something listens there, and does not respond."""
    with url_of("http", tmp_path, monkeypatch) as url, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if is_there:
            silent.listen()
        options = {
            "store": url,
            "elsewhere": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "cut_off": cut_off,
            "patience": SHORT,
        }
        declared = {"store": True, "saves": "all", "best_effort": True}
        target = Target("cut_off:CutOff", options, capabilities=declared)
        variant = SPEC.cases["transfer.one-store"].variants(["reference"])[0]
        report = run_and_judge(variant, target, SPEC, seed=0, tmp=tmp_path / "judged")
        assert report.harness_error is None
        bad = [row for row in report.rows if row.verdict in ("FAIL", "ERROR", "BLOCKED")]
        assert [row.message for row in bad if row.kind == "requirement"] == []
        assert open_store(url, patience=BUSY).reset()
        run = run_variant(variant, target, seed=0, tmp=tmp_path / "run")
        loading = {event["on"] for event in run.trace if event["kind"] == "load.due"}
        assert cut_off not in loading and (cut_off or loading == {"one", "two"})
        assert [*open_store(url, patience=BUSY).keys()]
