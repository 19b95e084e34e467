# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine's statistics: lookups that count although their answer was not used."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from vllm.v1.request import Request

from kvconform.refimpl.defects import targets
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.faulty import skipped


@targets.COUNT_QUERY.replaced_by
def counts_skipped_lookups(
    count: Any, engine: Engine, request: Request, local: int, external: int
) -> None:
    """Count the lookup of a request that does not read the cache as a miss (B121)."""
    with patch.object(request, "skip_reading_prefix_cache", False):
        count(engine, request, local, external)


@targets.LOOK_UP.after
def _counts_when_asked(found: Any, engine: Engine, request: Request) -> None:
    if found is not None and engine.connector_prefix_cache_stats is not None:
        _, local, external, _ = found
        engine.connector_prefix_cache_stats.record(
            num_tokens=request.num_tokens - local, num_hits=external, preempted=False
        )


counts_every_attempt = _counts_when_asked + targets.COUNT_QUERY.replaced_by(skipped)
"""Count a lookup at every attempt, and not the admission: also if the request finds no memory."""
