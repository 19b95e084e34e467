# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine's statistics: lookups that count although nobody used their answer."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request

from kvconform.refimpl import admission
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.faulty import fault


@fault(admission, "_count_query")
def counts_skipped_lookups(
    count: Any, engine: Engine, request: Request, local: int, external: int
) -> None:
    """Counts the lookup of a request that reads no cache too, as a miss (B121)."""
    skipping, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, False
    count(engine, request, local, external)
    request.skip_reading_prefix_cache = skipping


@fault(admission, "_look_up")
def _counts_when_asked(look_up: Any, engine: Engine, request: Request) -> Any:
    """Counts a lookup when it is made: once more at every attempt of a request that finds no memory."""
    found = look_up(engine, request)
    if found is not None and engine.connector_prefix_cache_stats is not None:
        _, local, external, _ = found
        engine.connector_prefix_cache_stats.record(
            num_tokens=request.num_tokens - local, num_hits=external, preempted=False
        )
    return found


@_counts_when_asked.and_(admission, "_count_query")
def counts_every_attempt(count: Any, *args: Any) -> None:
    """The admission itself is not counted then."""
