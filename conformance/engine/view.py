# SPDX-License-Identifier: Apache-2.0
"""The interface of an engine driven by hand for its observer, ledger and workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvconform.contract.trace import Event
from kvconform.engine.batch import Batch, Info, Script
from kvconform.engine.ranks import Ranks
from kvconform.kv.oracle import Oracle
from kvconform.kv.provenance import HandedOut, Identity
from kvconform.observe.view import block_tables


@dataclass
class Flight:
    """A step that was scheduled and has not landed: update_from_output is due.

    `fresh`: the blocks that were handed out for it. `launched`: its req.scheduled events by request
    id. `digest`: that of the metadata, or None. `result` is None until the workers have executed
    the step; `corrupt` are the requests whose tokens were sampled from wrong KV then.
    """

    output: Any
    step: int
    fresh: list[HandedOut]
    launched: dict[str, Event]
    digest: str | None = None
    result: Any = None
    corrupt: set[str] = field(default_factory=set)


class EngineView:
    """A kvconform.observe.view.SchedulerView. Its parts are filled in while the engine is built."""

    def __init__(self, info: Callable[[str], Info], ranks: Ranks) -> None:
        """Create the view.

        `info(req_id)` returns what the harness knows of a live request, or raises KeyError.
        """
        self.info = info
        self.ranks = ranks
        self.scheduler: Any = None
        self.batch: Batch
        self.queue: deque[Flight] = deque()

    @property
    def loads(self) -> Oracle:
        """See SchedulerView."""
        return self.ranks.current.worker.oracle

    @property
    def other_loads(self) -> Sequence[Oracle]:
        """See SchedulerView."""
        return [rank.worker.oracle for rank in self.ranks.members[:-1]]

    def generation(self, req_id: str) -> int:
        """See SchedulerView."""
        try:
            return self.info(req_id).generation
        except KeyError:
            return 0

    def identity(self, req_id: str) -> Identity:
        """See SchedulerView. KeyError for an unknown id."""
        return self.info(req_id).identity

    def incarnation(self, req_id: str) -> tuple[int, Identity, Script]:
        """Return what a worker needs to know of a request: generation, identity and script."""
        found = self.info(req_id)
        return found.generation, found.identity, found.script

    def valid_end(self, req_id: str) -> int:
        """See SchedulerView."""
        state = self.batch.requests.get(req_id)
        if state is None or state.chain.generation != self.info(req_id).generation:
            return 0
        return state.valid_end

    def held_contents(self) -> set[int]:
        """See SchedulerView. KV that is only kept for a save does not count."""
        held: set[int] = set()
        for req_id in self.tables():
            state = self.batch.requests.get(req_id)
            if state is not None and not self.scheduler.requests[req_id].is_finished():
                held.update(state.chain.ids[: state.valid_end])
        return held

    def tables(self) -> dict[str, list[list[int]]]:
        """See SchedulerView. Empty before the scheduler is built."""
        return {} if self.scheduler is None else block_tables(self.scheduler)

    def held_blocks(self) -> dict[str, list[int]]:
        """Return the blocks of all requests that hold some, of whatever group, by request id."""
        tables = self.tables().items()
        return {req_id: [block for table in groups for block in table] for req_id, groups in tables}

    def in_flight(self) -> list[int]:
        """See SchedulerView."""
        return [id(flight.output) for flight in self.queue]
