# SPDX-License-Identifier: Apache-2.0
"""The interface through which observer and ledger read the scheduler that they watch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from kvconform.kv.oracle import Loads
from kvconform.kv.provenance import Identity


class SchedulerView(Protocol):
    """Read access to one scheduler and its requests, independent of the engine.

    There is one implementation for an engine that is driven by hand (kvconform.engine.view), and
    one for a running vLLM (kvconform.live.scheduler_probe).
    """

    scheduler: Any
    """vLLM's scheduler, or the reference engine's."""

    @property
    def loads(self) -> Loads:
        """The loads of the rank that runs now; between steps, of the rank that samples."""

    @property
    def other_loads(self) -> Sequence[Loads]:
        """The loads of all other ranks, if there are several in this process."""

    def generation(self, req_id: str) -> int:
        """Return the incarnation of a request id; 0 for an unknown id.

        A connector may report any id.
        """

    def identity(self, req_id: str) -> Identity:
        """Return what distinguishes the request's KV from that of the same tokens elsewhere."""

    def valid_end(self, req_id: str) -> int:
        """Return the end of the request's final KV, in tokens, after the steps in flight."""

    def held_contents(self) -> set[int]:
        """Return the content ids of the final KV of unfinished requests."""

    def tables(self) -> dict[str, list[list[int]]]:
        """Return the block tables of requests that hold blocks, by request id; one per group."""

    def in_flight(self) -> list[int]:
        """Return the `id()` of each SchedulerOutput that was scheduled and has not landed."""


def references(tables: dict[str, list[list[int]]]) -> Counter[int]:
    """Return how often block tables name each block; `tables` as in SchedulerView."""
    return Counter(block for groups in tables.values() for table in groups for block in table)


def block_tables(scheduler: Any) -> dict[str, list[list[int]]]:
    """Return the block tables of a vLLM scheduler's requests that hold blocks, by request id."""
    manager = scheduler.kv_cache_manager
    tables = {}
    for req_id in scheduler.requests:
        groups = [list(table) for table in manager.get_block_ids(req_id)]
        if any(groups):
            tables[req_id] = groups
    return tables
