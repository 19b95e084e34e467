# SPDX-License-Identifier: Apache-2.0
"""Tests that the suite reads LMCache's counters of one run, and what happened in it."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

NAME = "kvconform.adapters._lmcache_metrics"


class Monitor:
    """Counts hit tokens, as LMCStatsMonitor does."""

    _instance: Monitor | None = None

    def __init__(self) -> None:
        self.hits = 0

    @classmethod
    def GetOrCreate(cls) -> Monitor:
        cls._instance = cls._instance or cls()
        return cls._instance

    @classmethod
    def DestroyInstance(cls) -> None:
        cls._instance = None

    def get_stats_and_clear(self) -> int:
        hits, self.hits = self.hits, 0
        return hits


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the adapter's module over a stand-in for LMCache."""
    registry = CollectorRegistry()
    exported = Counter("lmcache:num_hit_tokens", "hits", ["worker_id"], registry=registry)
    Counter("vllm:other", "not LMCache's", registry=registry).inc(7)
    exported.labels("1").inc(1000)  # of an earlier run, on another rank
    logger = SimpleNamespace(log_prometheus=exported.labels("0").inc)
    observability: Any = ModuleType("lmcache.observability")
    observability.LMCStatsMonitor = Monitor
    observability.PrometheusLogger = SimpleNamespace(_get_base_logger=lambda: logger)
    monkeypatch.setitem(sys.modules, "lmcache", ModuleType("lmcache"))
    monkeypatch.setitem(sys.modules, "lmcache.observability", observability)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    monkeypatch.setattr(module, "REGISTRY", registry)
    Monitor.DestroyInstance()
    yield module
    sys.modules.pop(NAME, None)


def hits(metrics: Any) -> float:
    return float(metrics.counters()["lmcache:num_hit_tokens_total"])


def test_counters_are_those_of_the_run(metrics: Any) -> None:
    Monitor.GetOrCreate().hits = 5
    with metrics.of_run():
        Monitor.GetOrCreate().hits += 32
        assert hits(metrics) == 32
        Monitor.GetOrCreate().hits += 8
        with metrics.of_run():
            Monitor.GetOrCreate().hits += 100
            assert hits(metrics) == 100
        assert hits(metrics) == 40
        assert not any(name.startswith("vllm") for name in metrics.counters())


def test_what_happened_is_of_the_run(metrics: Any) -> None:
    with metrics.of_run():
        metrics.facts["tokens_saved"] += 16
        with metrics.of_run():
            assert metrics.known()["tokens_saved"] == 0
        assert metrics.known()["tokens_saved"] == 16
    assert metrics.known()["tokens_saved"] == 0


class Remote:
    """Writes chunks to a store, as InstrumentedRemoteConnector does."""

    def __init__(self, store: Any) -> None:
        self.store = store

    async def put(self, key: str, chunk: Any) -> None:
        await self.store.put(key, chunk)

    async def batched_put(self, keys: list[str], chunks: list[Any]) -> None:
        with suppress(ConnectionError):
            await self.store.batched_put(keys, chunks)


class Store:
    """Takes chunks unless it is down."""

    down = False

    async def put(self, keys: Any, chunks: Any) -> None:
        if self.down:
            raise ConnectionError

    batched_put = put


@pytest.fixture
def remote(metrics: Any, monkeypatch: pytest.MonkeyPatch) -> type[Remote]:
    """Return the adapted class of remote stores."""
    monkeypatch.setattr(Remote, "__init__", metrics.stored(Remote.__init__))
    for name in ("put", "batched_put"):
        monkeypatch.setattr(Remote, name, metrics.awaited(getattr(Remote, name)))
    return Remote


CHUNK = SimpleNamespace(byte_array=memoryview(bytes(64)).cast("i"))


def test_saved_bytes_are_those_that_a_store_took(metrics: Any, remote: type[Remote]) -> None:
    with metrics.of_run():
        connection = remote(Store())
        asyncio.run(connection.put("a", CHUNK))
        assert metrics.known()["bytes_saved"] == 64
        asyncio.run(connection.batched_put(["b", "c"], [CHUNK, CHUNK]))
        assert metrics.known()["bytes_saved"] == 192
        Store.down = True
        asyncio.run(connection.batched_put(["d"], [CHUNK]))
        with pytest.raises(ConnectionError):
            asyncio.run(connection.put("e", CHUNK))
        Store.down = False
        assert metrics.known()["bytes_saved"] == 192
        with metrics.of_run():
            asyncio.run(connection.put("f", CHUNK))  # by a store of an earlier run
            assert metrics.known()["bytes_saved"] == 0
        assert metrics.known()["bytes_saved"] == 256


def test_saved_bytes_are_unknown_while_a_write_lasts(
    metrics: Any, remote: type[Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PATIENCE", 0.01)
    with metrics.of_run():
        writing = remote(Store()).put("a", CHUNK)
        assert "bytes_saved" not in metrics.known()
        asyncio.run(writing)
        assert metrics.known()["bytes_saved"] == 64


def test_evictions_are_entries_that_are_gone(metrics: Any) -> None:
    backend = SimpleNamespace(cpu_lock=threading.Lock(), hot_cache={"a": 1, "b": 2, "c": 3})

    def allocate(self: Any, evict: list[str]) -> str:
        for key in evict:
            del self.hot_cache[key]
        return "memory"

    watched = metrics.watched(allocate)
    with metrics.of_run():
        assert watched(backend, evict=[]) == "memory"
        assert metrics.known()["evictions"] == 0
        watched(backend, evict=["a", "c"])
        assert metrics.known()["evictions"] == 2
        with pytest.raises(KeyError):
            watched(backend, evict=["b", "gone"])
        assert metrics.known()["evictions"] == 3
