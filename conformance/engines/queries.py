# SPDX-License-Identifier: Apache-2.0
"""The engine's own statistics of the external cache, step by step, beside what they have to say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvconform.trace import Trace


@contextmanager
def counted(trace: Trace, scheduler: Any) -> Iterator[None]:
    """Around one schedule(): emit `queries` if it counted lookups, or admitted a request that was looked up. Nothing where the scheduler
    keeps no statistics. Changes nothing but the trace."""
    stats = getattr(scheduler, "connector_prefix_cache_stats", None)
    if stats is None:
        yield
        return
    before, first = _counts(stats), len(trace.events)
    yield
    requests, tokens, hits = (now - then for now, then in zip(_counts(stats), before, strict=True))
    admitted = [event for event in trace.events[first:] if event["k"] == "alloc" and not event["second_call"]]
    reading = [event for event in admitted if not scheduler.requests[event["req"]].skip_reading_prefix_cache]
    if admitted or requests:
        trace.emit(
            "queries", requests=requests, tokens=tokens, hits=hits, due_requests=len(reading),
            due_tokens=sum(scheduler.requests[event["req"]].num_tokens - event["local"] for event in reading),
            due_hits=sum(event["external"] for event in reading),
            skipping=[event["req"] for event in admitted if event not in reading],
        )  # fmt: skip


def _counts(stats: Any) -> tuple[int, int, int]:
    """(requests, tokens, tokens that were there) so far; what was preempted before is counted apart by vLLM, and is not here."""
    return (
        stats.requests + stats.preempted_requests,
        stats.queries + stats.preempted_queries,
        stats.hits + stats.preempted_hits,
    )
