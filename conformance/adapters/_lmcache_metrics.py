# SPDX-License-Identifier: Apache-2.0
"""LMCache's own counters of one run, and the facts that they are compared with.

LMCache counts in a monitor. A thread of its logger takes what was counted every ten seconds, and
adds it to metrics of Prometheus. Both exist once in the process, for all ranks.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event
from typing import Any

from lmcache.observability import LMCStatsMonitor, PrometheusLogger
from prometheus_client import REGISTRY

PREFIX = "lmcache:"

facts: Counter[str] = Counter()
"""What the adapter saw happen in this run, on all ranks, by meaning (capability `metrics`).

Each run has its own object.
"""

_writes: list[Event] = []
"""Of each write to a remote store in this run: set once it is over."""
PATIENCE = 2.0
"""Seconds that the writes of a run may take to end."""

_before: dict[str, float] = {}
"""The samples at the start of the run, and those of runs within it."""


@contextmanager
def of_run() -> Iterator[None]:
    """Count a run from 0, with a monitor of its own. May be nested."""
    global _before, _writes, facts
    outer, start, monitor = _before, _samples(), LMCStatsMonitor._instance
    seen, writes = facts, _writes
    _before, facts, _writes = start, Counter(), []
    LMCStatsMonitor.DestroyInstance()
    try:
        yield
    finally:
        spent = _since(start)
        _before = {name: outer.get(name, 0) + value for name, value in spent.items()}
        LMCStatsMonitor._instance = monitor
        facts, _writes = seen, writes


def counters() -> Mapping[str, float]:
    """Return the samples of LMCache's metrics in this run, by name, over all labels."""
    return _since(_before)


def known() -> Mapping[str, float]:
    """Return what is known exactly.

    Those are the bytes of chunks that were copied into pages, the tokens that were copied out of
    pages, the bytes that a remote store took, and the entries that were evicted from memory. A
    chunk has the layers that LMCache counts in the model, also those without KV. Waits for writes
    to end: without that, the bytes are not known.
    """
    exact = ["bytes_loaded", "tokens_saved", "evictions"]
    deadline = time.monotonic() + PATIENCE
    if all(write.wait(max(0, deadline - time.monotonic())) for write in _writes):
        exact.append("bytes_saved")
    return {what: facts[what] for what in exact}


def stored(construct: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of InstrumentedRemoteConnector, whose store counts what it takes.

    What a store of an earlier run takes later does not count.
    """

    def call(self: Any, store: Any) -> None:
        construct(self, store)
        store.put = _counting(store.put, facts)
        store.batched_put = _counting(store.batched_put, facts)

    return call


def _counting(put: Callable[..., Any], seen: Counter[str]) -> Callable[..., Any]:
    async def call(keys: Any, chunks: Any) -> None:
        batch = chunks if isinstance(chunks, list) else [chunks]
        size = sum(memoryview(chunk.byte_array).nbytes for chunk in batch)
        await put(keys, chunks)
        seen["bytes_saved"] += size

    return call


def awaited(put: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of InstrumentedRemoteConnector, whose writes `known` waits for.

    LMCache calls it when it saves, and leaves the coroutine to a thread.
    """

    def call(self: Any, keys: Any, chunks: Any) -> Any:
        over = Event()
        _writes.append(over)
        return write(over, put(self, keys, chunks))

    async def write(over: Event, writing: Any) -> None:
        try:
            await writing
        finally:
            over.set()

    return call


def watched(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of LocalCPUBackend, which evicts, counting what is gone afterwards."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _keys(self)
        try:
            return allocate(self, *args, **kwargs)
        finally:
            facts["evictions"] += len(before - _keys(self))

    return call


def _keys(backend: Any) -> set[Any]:
    with backend.cpu_lock:
        return set(backend.hot_cache)


def _since(before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in _samples().items()}


def _samples() -> dict[str, float]:
    """Do what the logger's thread does, and read the metrics."""
    logger = PrometheusLogger._get_base_logger()
    if logger is not None:
        logger.log_prometheus(LMCStatsMonitor.GetOrCreate().get_stats_and_clear())
    found: defaultdict[str, float] = defaultdict(float)
    for metric in REGISTRY.collect():
        if metric.name.startswith(PREFIX):
            for sample in metric.samples:
                found[sample.name] += float(sample.value)
    return found
