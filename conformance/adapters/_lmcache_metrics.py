# SPDX-License-Identifier: Apache-2.0
"""LMCache's own counters of one run, for adapter `lmcache-cpu`.

LMCache counts in a monitor. A thread of its logger takes what was counted every ten seconds, and
adds it to metrics of Prometheus. Both exist once in the process, for all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lmcache.observability import LMCStatsMonitor, PrometheusLogger
from prometheus_client import REGISTRY

PREFIX = "lmcache:"

_before: Counter[str] = Counter()
"""The samples at the start of the run, and those of runs within it."""


@contextmanager
def of_run() -> Iterator[None]:
    """Give the run a monitor of its own, and count from here. May be nested."""
    global _before
    outer, start, monitor = _before, _samples(), LMCStatsMonitor._instance
    _before = start
    LMCStatsMonitor.DestroyInstance()
    try:
        yield
    finally:
        spent = _samples()
        spent.subtract(start)
        _before = outer + spent
        LMCStatsMonitor._instance = monitor


def counters() -> Mapping[str, float]:
    """Return the samples of LMCache's metrics in this run, by name, over all labels."""
    found = _samples()
    found.subtract(_before)
    return found


def _samples() -> Counter[str]:
    """Do what the logger's thread does, and read the metrics."""
    logger = PrometheusLogger._get_base_logger()
    if logger is not None:
        logger.log_prometheus(LMCStatsMonitor.GetOrCreate().get_stats_and_clear())
    found: Counter[str] = Counter()
    for metric in REGISTRY.collect():
        if metric.name.startswith(PREFIX):
            for sample in metric.samples:
                found[sample.name] += float(sample.value)
    return found
