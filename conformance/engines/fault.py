# SPDX-License-Identifier: Apache-2.0
"""Where a real engine would go on silently and wrongly, ours stops."""

from __future__ import annotations

from typing import Any


class EngineFault(AssertionError):
    """The engine cannot go on because of what the connector made it believe."""


def check_starts(output: Any) -> None:
    """EngineFault if a SchedulerOutput computes a request from a negative position (after a negative lookup answer)."""
    cached = output.scheduled_cached_reqs
    starts = [(n.req_id, n.num_computed_tokens) for n in output.scheduled_new_reqs]
    starts += list(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for req, start in starts:
        if start < 0:
            raise EngineFault(f"request {req} is to be computed from position {start}: the model would run on a negative position")
