# SPDX-License-Identifier: Apache-2.0
"""How one engine executes a step: on every rank in turn, and what the ranks report as one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvconform import device
from kvconform.batch import Batch
from kvconform.digest import pickle_round_trip
from kvconform.engines.fault import check_starts
from kvconform.engines.info import Info
from kvconform.engines.joined import Joined
from kvconform.engines.ledger import Ledger
from kvconform.engines.ranks import Rank, in_place
from kvconform.lifecycle import in_order
from kvconform.observer import Observer
from kvconform.oracle import Oracle
from kvconform.provenance import Chain
from kvconform.trace import Trace
from kvconform.worker import Worker


class EngineExecution:
    """The ranks of an engine, the last of which samples. Every method but the context changes the engine and the trace."""

    trace: Trace
    ranks: list[Rank]
    worker: Worker
    oracle: Oracle
    batch: Batch
    scheduler: Any
    connector: Any
    observer: Observer
    ledger: Ledger
    inspector: Any
    aggregator: Joined | None
    pickle_metadata: bool
    info: Callable[[str], Info]
    depth: int
    progress: int
    reported_now: set[str] = set()

    @contextmanager
    def _as(self, rank: Rank) -> Iterator[None]:
        """What belongs to one rank's process is in place: vLLM's parallel groups, and whom the listeners look at."""
        if rank.place.alone:
            yield
            return
        self.trace.rank = rank.place.rank
        before = getattr(self, "worker", None)
        if before is not None and rank.worker is not None:
            self.worker, self.oracle = rank.worker, rank.worker.oracle
            if hasattr(self, "observer"):
                self.observer.oracle = self.oracle
        try:
            with in_place(rank.place):
                yield
        finally:
            self.trace.rank = None
            if before is not None:
                self.worker, self.oracle = before, before.oracle
                if hasattr(self, "observer"):
                    self.observer.oracle = before.oracle

    def _execute(self, output: Any, fresh: list[tuple[int, str]]) -> Any:
        check_starts(output)
        meta = output.kv_connector_metadata
        if self.connector is not None:
            self.observer.current_digest = self.observer.take_digest(meta)
            if self.inspector is not None:
                self._plan(meta)
            if self.pickle_metadata:
                unpickled, reason = pickle_round_trip(meta)
                if reason is None:
                    output.kv_connector_metadata = unpickled
        self.worker.begin(output, fresh)
        total, first = output.total_num_scheduled_tokens, len(self.trace.events)
        self.trace.emit("worker.step_begin", forward=total > 0, tokens=total, attn_metadata_none=total == 0, failed_forward=False)
        self.oracle.failed_blocks, self.oracle.failed_reqs, self.reported_now = set(), set(), set()
        self.observer.activity += 1 if total else 0
        self.worker.scheduled = set(output.num_scheduled_tokens)
        result, failed = self._step_of_ranks(output, fresh)
        if self.depth > 1:
            for rank in self.ranks:
                rank.worker.overlap.take_back()
        self.ledger.after_execute(self.worker.rows, failed)
        ended = dict(forward=total > 0, tokens=total, attn_metadata_none=total == 0, failed_forward=False)
        self.trace.emit("worker.step_end", **ended, ranks=self._bound_since(first) if len(self.ranks) > 1 else [])
        if total or self.reported_now:
            self.progress += 1
        return result

    def _bound_since(self, first: int) -> list[int]:
        """Ranks whose half was given metadata since event `first`."""
        bound = [e for e in self.trace.events[first:] if e["k"] == "hook.called" and e["hook"] == "bind_connector_metadata"]
        return sorted({e["rank"] for e in bound if e["depth"] == 0})

    def _step_of_ranks(self, output: Any, fresh: list[tuple[int, str]]) -> tuple[Any, set[str]]:
        """Run the step on every rank; returns the output of the one that samples, and the requests whose loads failed on any rank."""
        results, failed, meta = [], set[str](), output.kv_connector_metadata
        for rank in self.ranks:
            with self._as(rank):
                if rank.worker is not self.ranks[-1].worker:
                    rank.worker.begin(output, list(self.ranks[-1].worker.fresh))
                if self.aggregator is not None:  # every worker process unpickles its own
                    output.kv_connector_metadata = pickle_round_trip(meta)[0] or meta
                self.oracle.failed_blocks, self.oracle.failed_reqs, self.reported_now = set(), set(), set()
                assert rank.lifecycle is not None  # made before the first step
                results.append(copy.copy(rank.lifecycle.step(output)))
                self.oracle.check_writes("wait_for_save")
                device.current.finish()
                self._due()
                self.oracle.settle_reads()
                failed |= self._failed()
        output.kv_connector_metadata = meta
        result = results[0] if self.aggregator is None else self.aggregator.join(results)
        return in_order(result), failed

    def _due(self) -> None:
        for grant in self.oracle.open_grants():
            state = self.batch.requests.get(grant.req)
            if grant.is_async:
                if grant.req not in self.scheduler.requests:
                    grant.open = False  # the engine took another rank's report for the last one
                elif grant.req in self.reported_now:  # a failure may be told in any step before
                    self.oracle.due(grant, self._chain(grant.req))
            elif state is not None and grant.req in self.ranks[-1].worker.scheduled:
                self.oracle.due(grant, state.chain)

    def _failed(self) -> set[str]:
        blocks = self.oracle.failed_blocks
        if not blocks:
            return set()
        return {row.state.chain.req for row in self.worker.rows if blocks & set(row.state.table)}

    def _chain(self, req_id: str) -> Any:
        request, info = self.scheduler.requests[req_id], self.info(req_id)
        chain = Chain(req_id, info.generation, info.identity)
        for token in request.all_token_ids:
            chain.append(token)
        return chain

    def _plan(self, meta: Any) -> None:
        for entry in self.inspector.plan(meta):
            self.trace.emit("plan", **entry)
