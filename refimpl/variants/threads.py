# SPDX-License-Identifier: Apache-2.0
"""A connector that copies on threads (systems.md C4).

The step continues meanwhile. It waits only for saves whose blocks are about to be overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.paging import read_slots
from kvconform.refimpl.plan import Load, ReferenceMetadata, Save

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

THREADS = 2


class Threads(ReferenceConnector):
    """The reference connector with threads; use with `load: async` and `async_saves`.

    The threads access tensors and the store, but no state that is reported to the engine.
    """

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._pool = ThreadPoolExecutor(THREADS) if role == KVConnectorRole.WORKER else None
        self._loads: list[tuple[Load, Future[set[int]]]] = []
        self._saves: list[tuple[Save, Future[None]]] = []

    def _submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        assert self._pool is not None
        return self._pool.submit(work, *args)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._loads += [(load, self._submit(self._fetch, load)) for load in self._metadata().loads]

    def _fetch(self, load: Load) -> set[int]:
        """Fill the granted slots; return the blocks that could not be filled. Runs on a thread."""
        failed: set[int] = set()
        for piece in load.pieces:
            if not all([self._load_layer(piece, layer) for layer in self._layers]):
                self._store.drop(piece.key)  # else the next lookup would claim it again
                failed |= piece.blocks(self._block_size)
        return failed

    def wait_for_save(self) -> None:
        metadata = self._metadata()
        self._saves += [
            (save, self._submit(self._write, metadata.epoch, save, self._is_sound(save)))
            for save in metadata.saves
        ]

    def _write(self, epoch: int, save: Save, sound: bool) -> None:
        """Copy the blocks and commit the chunks. Runs on a thread."""
        if not sound:
            return
        for piece in save.pieces:
            for name, layer in self._layers.items():
                data = read_slots(layer, piece.slots, self._share)
                self._put(epoch, piece.key, name, data, len(piece.slots))
            self._store.commit(epoch, piece.key)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        super().handle_preemptions(kv_connector_metadata)
        if not isinstance(kv_connector_metadata, ReferenceMetadata):
            return
        for save, future in self._saves:
            if save.req in kv_connector_metadata.dropped and not save.final:
                future.result()  # the blocks are overwritten next

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loaded = [(load, future.result()) for load, future in self._loads if future.done()]
        self._loads = [(load, future) for load, future in self._loads if not future.done()]
        for _, failed in loaded:
            self._invalid |= failed
            self._bad |= failed
        # A request is reported when all its saves are done.
        busy = {save.req for save, future in self._saves if not future.done()}
        sent = {save.req for save, future in self._saves if save.final and save.req not in busy}
        self._saves = [
            (save, future)
            for save, future in self._saves
            if not future.done() or (save.final and save.req in busy)
        ]
        return sent or None, {load.req for load, _ in loaded} or None

    def shutdown(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        super().shutdown()


class SavingThreads(Threads):
    """Loads before the forward pass, and saves on threads."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super(Threads, self).start_load_kv(forward_context, **kwargs)
