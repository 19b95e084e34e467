# SPDX-License-Identifier: Apache-2.0
"""What observer and ledger may ask about the scheduler that they watch, and about its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvconform.kv.oracle import Loads
from kvconform.kv.provenance import Identity


class SchedulerView(Protocol):
    """One scheduler, on whatever engine. Asking changes nothing.

    An engine that is driven by hand has one (kvconform.engine.view), a running vLLM another
    (kvconform.live.scheduler_probe).
    """

    scheduler: Any
    """vLLM's scheduler, or the reference engine's."""

    @property
    def loads(self) -> Loads:
        """The loads of the rank that runs now; outside of a step, those of the rank that samples."""

    @property
    def other_loads(self) -> Sequence[Loads]:
        """The loads of all other ranks, if there are several in this process."""

    def generation(self, req_id: str) -> int:
        """Incarnation of a request id; 0 for an unknown id: a connector may report anything."""

    def identity(self, req_id: str) -> Identity:
        """What tells the request's KV from that of the same tokens in another request."""

    def valid_end(self, req_id: str) -> int:
        """End of the request's final KV, in tokens, once the steps in flight have run."""

    def held_contents(self) -> set[int]:
        """Content ids of the final KV of unfinished requests."""

    def tables(self) -> dict[str, list[list[int]]]:
        """Block tables of all requests that hold blocks, by request id; one per KV cache group."""

    def in_flight(self) -> list[int]:
        """`id()` of each SchedulerOutput that has been scheduled and has not landed."""


def block_tables(scheduler: Any) -> dict[str, list[list[int]]]:
    """Return the block tables of all requests of a vLLM scheduler that hold blocks, by request id."""
    manager, tables = scheduler.kv_cache_manager, {}
    for req_id in scheduler.requests:
        groups = [list(table) for table in manager.get_block_ids(req_id)]
        if any(groups):
            tables[req_id] = groups
    return tables
