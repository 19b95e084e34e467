# SPDX-License-Identifier: Apache-2.0
"""Connectors whose scheduler half decides which ends of transfers the engine hears of.

vLLM's scheduler reads finished_sending and finished_recving after update_connector_output, so that
a connector may change them there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvconform.refimpl.connector import ReferenceConnector

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

Ends = tuple[set[str] | None, set[str] | None]
"""Ids of requests that were sent, and that were received."""


@dataclass
class Acknowledged(KVConnectorWorkerMetadata):
    """Counts the ranks that are done with a transfer, by (direction, request id)."""

    ranks: Counter[tuple[str, str]] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return the counts of both."""
        assert isinstance(other, Acknowledged)
        return Acknowledged(self.ranks + other.ranks)


class ReportsByScheduler(ReferenceConnector):
    """Tells the engine of ends from its scheduler half, when all ranks are done (FlexKV)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ends: Counter[tuple[str, str]] = Counter()

    def get_finished(self, finished_req_ids: set[str]) -> Ends:
        sent, received = super().get_finished(finished_req_ids)
        self._ends.update(("send", req) for req in sent or ())
        self._ends.update(("recv", req) for req in received or ())
        return None, None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata:
        """Return the ends since the last call; in every step, as the engine asks only then."""
        ends, self._ends = self._ends, Counter()
        return Acknowledged(ends)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, Acknowledged):
            self._ends += told.ranks
        ranks = self._vllm_config.parallel_config.world_size
        for end in [end for end, count in self._ends.items() if count == ranks]:
            del self._ends[end]
            name = "finished_sending" if end[0] == "send" else "finished_recving"
            setattr(connector_output, name, {*(getattr(connector_output, name) or ()), end[1]})
        super().update_connector_output(connector_output)


class KeepsReportsBack(ReferenceConnector):
    """Passes every end of its own sends on one step later than its ranks report it (MoRIIO)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._told: Counter[tuple[str, str]] = Counter()
        self._own: set[str] = set()
        self._kept: set[str] = set()

    def get_finished(self, finished_req_ids: set[str]) -> Ends:
        sent, received = super().get_finished(finished_req_ids)
        self._told.update(("send", req) for req in sent or ())
        return sent, received

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata:
        """Return its own ends; in every step, so that the engine calls update_connector_output."""
        told, self._told = self._told, Counter()
        return Acknowledged(told)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, Acknowledged):
            self._own |= {req for _, req in told.ranks}
        ended = set(connector_output.finished_sending or ())
        kept, self._kept = self._kept, ended & self._own
        self._own -= ended
        connector_output.finished_sending = ended - self._kept | kept or None
        super().update_connector_output(connector_output)

    def has_pending_push_work(self) -> bool:
        """Return whether a step is needed for what was kept back."""
        return bool(self._kept) or super().has_pending_push_work()
