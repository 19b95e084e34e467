# SPDX-License-Identifier: Apache-2.0
"""Planted defects: what every request, or every engine, leaves behind."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector
from kvconform.refimpl.plan import Load, ReferenceMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class KeepsPins(ReferenceConnector):
    """Pins the chunks that a lookup found, and never unpins those of a request that is over."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        pins: list[tuple[str, int]] = self.__dict__.setdefault("_pins", [])
        pins.append((request.request_id, num_computed_tokens))
        return answer


class KeepsTables(ReferenceConnector):
    """Keeps the block table of every request that it has seen."""

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        tables: dict[str, Sequence[int]] = self.__dict__.setdefault("_tables", {})
        tables[request.request_id] = self._tracked[request.request_id].table


class KeepsUnanswered(ReferenceConnector):
    """Answers the first lookup of a request with None, and forgets that when it is admitted.

    A request that is aborted before leaves its entry behind.
    """

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        asked: set[str] = self.__dict__.setdefault("_asked", set())
        if request.request_id not in asked:
            asked.add(request.request_id)
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._asked.discard(request.request_id)


class _Kept(ReferenceConnector):
    """Leaves something behind for every load of the worker half."""

    def _leave(self) -> None:
        raise NotImplementedError

    def _load(self, load: Load, *args: Any) -> None:
        self._leave()
        super()._load(load, *args)


class KeepsFutures(_Kept):
    """Keeps the future of every load in the worker half."""

    def _leave(self) -> None:
        self.__dict__.setdefault("_futures", []).append(Future())


class UsesBuffersUp(_Kept):
    """Takes a buffer from the worker half's pool for every load, and gives none back."""

    def _leave(self) -> None:
        free: list[int] = self.__dict__.setdefault("_free", list(range(1_000)))
        if free:
            free.pop()


class KeepsBuffersOfFailures(ReferenceConnector):
    """Takes a buffer for every load, gives it back after the load, and not if that failed."""

    def _load(self, load: Load, *args: Any) -> None:
        free: list[int] = self.__dict__.setdefault("_free", list(range(16)))
        buffer = free.pop()
        before = set(self._invalid)
        super()._load(load, *args)
        if self._invalid == before:
            free.append(buffer)


def _saving(metadata: ReferenceMetadata, has_room: bool) -> ReferenceMetadata:
    """Return a step's metadata; without its saves, if the store has no room for them."""
    return metadata if has_room else replace(metadata, saves=metadata.saves[:0])


class HoldsForEveryAdmission(ReferenceConnector):
    """Holds what a request loads at each admission, and lets go once, when the request ends.

    It stores nothing when 100 chunks are held.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._held: Counter[str] = Counter()
        self._loaded: set[str] = set()

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._loaded.add(request.request_id)
            self._held.update(self._keys(request, [], request.num_tokens))

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        if request.request_id in self._loaded:
            self._loaded.remove(request.request_id)
            self._held.subtract(self._keys(request, [], request.num_tokens))
            self._held = +self._held
        return super().request_finished(request, block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        return _saving(metadata, self._held.total() < 100)


class LosesRoom(ReferenceConnector):
    """Loses the room of each aborted request, and stores nothing when 40 blocks are lost."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        if request.status.name == "FINISHED_ABORTED":
            self._lost = self.__dict__.get("_lost", 0) + len(block_ids)
        return super().request_finished(request, block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        return _saving(metadata, self.__dict__.get("_lost", 0) < 40)


class LosesRoomInResets(ReferenceConnector):
    """Has room for 40 blocks, and forgets in a reset which of it is in use."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        used: set[str] = self.__dict__.setdefault("_used", set())
        if len(used) >= 40:
            return _saving(metadata, False)
        used.update(piece.key for save in metadata.saves for piece in save.pieces)
        return metadata


class LosesWhatIsSavedTwice(ReferenceConnector):
    """Takes room for each save of a block, and loses it when another one in the step overwrites it.

    It stores nothing when the room of 40 blocks is lost.
    """

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        keys = [piece.key for save in metadata.saves for piece in save.pieces]
        self._lost = self.__dict__.get("_lost", 0) + len(keys) - len(set(keys))
        return _saving(metadata, self._lost < 40)


class KeepsFuturesOfLaterRanks(KeepsFutures):
    """Keeps the future of every load on all ranks but the first."""

    def _leave(self) -> None:
        if self._vllm_config.parallel_config.rank:
            super()._leave()


_BUFFERS: list[torch.Tensor] = []


class KeepsBuffers(_Kept):
    """Keeps a buffer for every load in a module, where no half refers to it."""

    def _leave(self) -> None:
        _BUFFERS.append(torch.zeros(4))


class KeepsFiles(_Kept):
    """Opens a file for every load, and never closes it."""

    def _leave(self) -> None:
        os.open("/dev/null", os.O_RDONLY)


_CACHES: dict[str, dict[str, torch.Tensor]] = {}


class KeepsCaches(ReferenceConnector):
    """Keeps the KV caches of every engine in a table of the module, by the engine's id."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        _CACHES[str(self._kv_transfer_config.engine_id)] = kv_caches


class LeavesSocket(ReferenceConnector):
    """Never closes the socket on which its worker half listens, and a list of the class has it."""

    servers: ClassVar[list[socket.socket]] = []

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self.servers.append(socket.create_server(("127.0.0.1", 0)))


class LeavesFile(ReferenceConnector):
    """Opens a file for every engine, and never closes it."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        os.open(__file__, os.O_RDONLY)
