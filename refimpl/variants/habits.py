# SPDX-License-Identifier: Apache-2.0
"""Connectors that do what the reference connector does, but are written in an unusual way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent

from kvconform.refimpl.connector import Finish, ReferenceConnector
from kvconform.refimpl.plan import ReferenceMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class RefusesLatentLayers(ReferenceConnector):
    """Moves layer by layer, and refuses MLA, for which it has no layer-wise copies.

    vLLM's factory refuses combinations by a ValueError as well.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.options.layerwise and vllm_config.model_config.use_mla:
            raise ValueError("layer-wise transfers are not supported with MLA")


class OwnHashes(ReferenceConnector):
    """Publishes KV events with block hashes of its own and with token ids, as LMCache does."""

    def take_events(self) -> Iterable[KVCacheEvent]:
        for event in super().take_events():
            if isinstance(event, BlockStored | BlockRemoved):
                event.block_hashes = [_own(key) for key in event.block_hashes]
            if isinstance(event, BlockStored) and event.parent_block_hash is not None:
                event.parent_block_hash = _own(event.parent_block_hash)
            yield event


def _own(key: ExternalBlockHash) -> bytes:
    return sha256(repr(key).encode()).digest()


class KeepsLast(ReferenceConnector):
    """Keeps the request that finished last, as for metrics: one object, so this is not a leak."""

    last: Request | None = None

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        self.last = request
        return super().request_finished(request, block_ids)


@dataclass(frozen=True)
class Beating(ReferenceMetadata):
    """The plan of a step, and the requests that are alive."""

    heartbeats: dict[str, int] = field(default_factory=dict)


class HandsOutItsOwn(ReferenceConnector):
    """Puts a dictionary into each step's metadata and keeps changing it.

    NixlConnector does so with its heartbeats. A worker half that reads the dictionary may learn
    of a request one step later; this one does not read it.
    """

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata: Any = super().build_connector_meta(scheduler_output)
        alive: dict[str, int] = self.__dict__.setdefault("_alive", {})
        alive.update(dict.fromkeys(scheduler_output.num_scheduled_tokens, 1))
        for req_id in scheduler_output.finished_req_ids:
            alive.pop(req_id, None)
        return Beating(
            metadata.epoch,
            metadata.loads,
            metadata.saves,
            metadata.dropped,
            metadata.repaired,
            alive,
        )


class OwnMetadata(ReferenceConnector):
    """Keeps the metadata of a step in a field of its own, and says so when it is asked."""

    _mine: KVConnectorMetadata | None = None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._mine = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._mine = None

    def has_connector_metadata(self) -> bool:
        return self._mine is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._mine is not None
        return self._mine


class InstanceHooks(ReferenceConnector):
    """Chooses some of its hooks at construction, and sets them on the instance."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        chosen: dict[str, Any] = {
            name: partial(getattr(ReferenceConnector, name), self)
            for name in ("request_finished", "get_finished")
        }
        self.__dict__.update(chosen)
