# SPDX-License-Identifier: Apache-2.0
"""Planted defects: a reset or a failed load that takes away too little, or too much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from kvconform.refimpl.cache.chunks import EPOCH, ChunkStore
from kvconform.refimpl.cache.seal import seal
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.paging import read_slots
from kvconform.refimpl.plan import Load, ReferenceMetadata, Save
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput


class TogglesEpoch(ReferenceConnector):
    """Has two epochs that take turns: what was in flight at the last but one reset is current."""

    def reset_cache(self) -> bool | None:
        result = super().reset_cache()
        store = self._store
        store.backend.set(EPOCH, seal(EPOCH, str(store.epoch() % 2).encode()))
        return result


class KnowsOneReset(ReferenceConnector):
    """Knows whether the store was reset, and not how often."""

    def reset_cache(self) -> bool | None:
        result = super().reset_cache()
        self._store.backend.set(EPOCH, seal(EPOCH, b"1"))
        return result


class LosesHalfOnReset(ReferenceConnector):
    """Collects a chunk's tokens step by step in a buffer that a reset clears.

    It stores the chunk when its last token is there, whatever became of the others.
    """

    _cleared: dict[str, int]

    def reset_cache(self) -> bool | None:
        result = super().reset_cache()
        self._cleared = {}
        for name, tracked in self._tracked.items():
            tracked.outdated = False
            self._cleared[name] = tracked.request.num_computed_tokens
        return result

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        save = super()._plan_save(tracked, end, scheduled, final)
        chunk = self.options.chunk_tokens
        cleared = getattr(self, "_cleared", {}).get(save.req, 0)
        number, lost = divmod(cleared, chunk)
        halved = set(self._keys(tracked.request, tracked.keys, end)[number : number + 1])
        pieces = (
            replace(piece, first=lost, slots=piece.slots[lost:]) if piece.key in halved else piece
            for piece in save.pieces
        )
        return replace(save, pieces=tuple(pieces))

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        for piece in save.pieces:
            data = read_slots(kv_layer, piece.slots, self._share)
            empty = bytes(piece.first * len(data) // len(piece.slots))
            self._store.put(epoch, piece.key, layer, empty + data)


class LosesAll(ReferenceConnector):
    """Empties its store when a load finds a chunk gone."""

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        before = len(self._invalid)
        super()._load(load, layers)
        if len(self._invalid) > before:
            for key in list(self._store.keys()):
                self._store.drop(key)


class SavesUponFailedLoads(ReferenceConnector):
    """Saves what a step computes upon blocks whose load has failed."""

    def _is_sound(self, save: Save) -> bool:
        return True


class OverlooksFirstBlock(ReferenceConnector):
    """Looks for failed loads in all blocks of a request but the first when it saves."""

    def _is_sound(self, save: Save) -> bool:
        return self._bad.isdisjoint(save.table[1:])


class ForgetsFailuresEarly(ReferenceConnector):
    """Remembers a failed load for two steps: as many as asynchronous scheduling has in flight."""

    _known: frozenset[int] = frozenset()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._bad -= self._known
        self._known = frozenset(self._bad)


class TrustsOlderReports(ReferenceConnector):
    """Takes the blocks of a load for filled at the next report, which is about an older step."""

    _newest: frozenset[int] = frozenset()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        pieces = (piece for load in metadata.loads for piece in load.pieces)
        self._newest = frozenset().union(*(piece.blocks(self._block_size) for piece in pieces))
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        self._repaired |= self._newest


class RepairsForEver(ReferenceConnector):
    """Takes a block whose load failed once, and was acknowledged, for repaired ever after."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        repaired = set(self._repaired)
        metadata = super().build_connector_meta(scheduler_output)
        self._repaired = repaired
        return metadata


class RemembersFailedBlocks(ReferenceConnector):
    """Never takes a block for sound again whose load has failed once, whatever it holds later."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        self._repaired.clear()


class LostForGood(ReferenceConnector):
    """Counts up to where a request is stored, and not down when the engine computes it again."""

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        stored = self.__dict__.setdefault("_stored_of", {})
        req_id = tracked.request.request_id
        tracked.saved = max(tracked.saved, stored.get(req_id, 0))
        save = super()._plan_save(tracked, end, scheduled, final)
        stored[req_id] = tracked.saved
        return save


class StoresEveryStep(ReferenceConnector):
    """Stores every chunk of a request again in each of its steps."""

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        tracked.saved = 0
        store = self._store
        self._store = cast(ChunkStore, SimpleNamespace(has=lambda key: False, epoch=store.epoch))
        try:
            return super()._plan_save(tracked, end, scheduled, final)
        finally:
            self._store = store


class KeepsPinsOfOvertakenSaves(ReferenceConnector):
    """Has a cache of ROOM chunks, and leaves one pinned for each request that a reset overtakes.

    When all chunks are pinned, it stores nothing more.
    """

    ROOM = 12
    _pinned = 0

    def reset_cache(self) -> bool | None:
        self._pinned += len(self._tracked)
        return super().reset_cache()

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        save = super()._plan_save(tracked, end, scheduled, final)
        return replace(save, pieces=save.pieces[: max(0, self.ROOM - self._pinned)])
