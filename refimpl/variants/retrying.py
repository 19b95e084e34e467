# SPDX-License-Identifier: Apache-2.0
"""A connector whose worker half refuses asynchronous loads for want of a buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvconform.refimpl.connector import ReferenceConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

    from kvconform.refimpl.plan import Load


@dataclass
class Refused(KVConnectorWorkerMetadata):
    """The requests whose loads were refused; every rank refuses the same ones."""

    requests: frozenset[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return those of both."""
        assert isinstance(other, Refused)
        return Refused(self.requests | other.requests)


class Retrying(ReferenceConnector):
    """Has one buffer for loads. One that finds it taken is planned again with a later step.

    Until finished_recving names the request, vLLM keeps its blocks, also after an abort.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._open: dict[str, Load] = {}
        self._again: list[Load] = []
        self._busy: set[str] = set()
        self._refused: set[str] = set()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata: Any = super().build_connector_meta(scheduler_output)
        self._open |= {load.req: load for load in metadata.loads}
        again, self._again = self._again, []
        return replace(metadata, loads=(*metadata.loads, *again))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, Refused):
            self._again += [self._open[req] for req in sorted(told.requests)]
        for req in connector_output.finished_recving or ():
            self._open.pop(req, None)
        super().update_connector_output(connector_output)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._metadata().loads:
            if self._busy:
                self._refused.add(load.req)
            else:
                self._busy.add(load.req)
                self._load_queue.add(load, self.options.load_delay)
        if forward_context.attn_metadata is None:
            self.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        self._busy -= received or set()
        return sent, received

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what was refused in the step."""
        refused, self._refused = frozenset(self._refused), set()
        return Refused(refused) if refused else None
