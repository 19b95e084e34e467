# SPDX-License-Identifier: Apache-2.0
"""A connector that prefetches, batches, and uses two buffers (systems.md C4; `refimpl/cache/`).

A lookup starts to fetch what the store has of a request, and answers None until it is in memory.
Chunks travel between the store and two host buffers in batches, on a thread; meanwhile the other
buffer is copied into or out of the paged cache. Both halves share the memory, so they must be in
one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvconform.refimpl.cache.batches import batches
from kvconform.refimpl.cache.chunks import VALUES, ChunkStore
from kvconform.refimpl.cache.codecs import CodecError
from kvconform.refimpl.cache.prefetch import Prefetching
from kvconform.refimpl.cache.staging import Buffer, Staging
from kvconform.refimpl.cache.urls import open_backend
from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector
from kvconform.refimpl.faults import Faults
from kvconform.refimpl.inspector import Inspector
from kvconform.refimpl.options import Options
from kvconform.refimpl.paging import bytes_in, read_slots, write_slots
from kvconform.refimpl.plan import Load, Piece, Save

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

Batch = list[Piece]


@dataclass(frozen=True)
class BufferedOptions(Options):
    """The options of a connector with prefetch and buffers."""

    batch: int = 2
    """Chunks per batch."""
    prefetch: int = 64
    """How many chunks the memory for prefetched ones may hold."""


class Buffered(ReferenceConnector):
    """The reference connector with prefetch, batches and double buffering.

    Its additional options are those of `BufferedOptions`.
    """

    options: BufferedOptions
    options_kind = BufferedOptions
    memory_kind: ClassVar[type[Prefetching]] = Prefetching
    staging_kind: ClassVar[type[Staging[Batch]]] = Staging
    memories: ClassVar[dict[tuple[str, str], Prefetching]] = {}
    """Memory of the halves and ranks of one engine, by engine id and store."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._world = parallel.world_size
        self._place = (str(self._kv_transfer_config.engine_id), self.options.store)
        if self._place not in self.memories:
            self.memories[self._place] = self._new_memory()
        self._memory = self.memories[self._place]
        self._store = ChunkStore(self._memory, parallel.rank, self._world)
        self._faults = Faults(self._store)
        self._staging = self.staging_kind()

    def _new_memory(self) -> Prefetching:
        return self.memory_kind(
            open_backend(self.options.store, self.options.patience),
            self.options.prefetch * self._world,
            self.options.batch,
        )

    # -- Scheduler half

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        """Answer None until what the store has is in memory."""
        if self._may_load and not self._is_fetched(request, num_computed_tokens):
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _is_fetched(self, request: Request, local: int) -> bool:
        """Start to fetch the chunks behind the local hit; return whether all are in memory."""
        keys = self._keys(request, [], request.num_tokens)
        stored = list(takewhile(self._store.has, keys))
        names = [
            name
            for key in stored[local // self.options.chunk_tokens :]
            for name in self._names(key)
        ]
        return self._memory.prefetch(request.request_id, names)

    def _names(self, key: str) -> Sequence[str]:
        return self._store.names(key)

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        """Release what was fetched: a load that is under way reads the store instead."""
        self._memory.release(request.request_id)
        return super().request_finished(request, block_ids)

    # -- Worker half

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        """Fill the granted slots batch by batch; note the blocks that could not be filled."""
        names = list(layers)

        def fill(batch: Batch, buffer: Buffer) -> None:
            self._fetch(batch, names, buffer)

        for batch, buffer in self._staging.incoming(self._batches(load.pieces), fill):
            for number, piece in enumerate(batch):
                # A list, not a generator: all layers are loaded, even after one that failed.
                if not all([self._copy_in(buffer, number, piece, name) for name in names]):
                    self._store.drop(piece.key)
                    self._invalid |= piece.blocks(self._block_size)
                    self._bad |= piece.blocks(self._block_size)
        if names and not self.options.layerwise:
            self._memory.release(load.req)

    def _batches(self, pieces: Sequence[Piece]) -> Iterable[Batch]:
        return batches(pieces, self.options.batch)

    def _fetch(self, batch: Batch, layers: Sequence[str], buffer: Buffer) -> None:
        """Fill a buffer from the store. Runs on the staging thread."""
        found = self._store.read_many([piece.key for piece in batch])
        parts: dict[tuple[int, str], bytes] = {}
        for number, stored in enumerate(found):
            for layer in layers:
                with suppress(KeyError, CodecError):
                    dtype = self._layers[layer].dtype
                    parts[number, layer] = self._codec.decode(stored[layer], dtype)
        buffer.fill(parts)

    def _copy_in(self, buffer: Buffer, number: int, piece: Piece, layer: str) -> bool:
        """Copy one layer of a piece into the paged cache; return whether the buffer has it."""
        data = buffer.get((number, layer))
        kv_layer = self._layers[layer]
        if data is None or not write_slots(kv_layer, piece.slots, data, piece.first, self._share):
            return False
        self._count("bytes_loaded", bytes_in(kv_layer, piece.slots, self._share))
        return True

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Leave all layers to wait_for_save: a batch has all layers of its chunks."""

    def _save(self, epoch: int, save: Save, layers: Iterable[str]) -> None:
        """Store these layers batch by batch, and commit the chunks."""
        names = list(layers)

        def drain(batch: Batch, buffer: Buffer) -> None:
            self._store_batch(epoch, batch, names, buffer)

        sound = save.pieces if self._is_sound(save) else ()
        for batch, buffer in self._staging.outgoing(self._batches(sound), drain):
            buffer.fill(
                {
                    (number, name): read_slots(self._layers[name], piece.slots, self._share)
                    for number, piece in enumerate(batch)
                    for name in names
                }
            )
        if save.final:
            self._sent.add(save.req)

    def _store_batch(self, epoch: int, batch: Batch, layers: Sequence[str], buffer: Buffer) -> None:
        """Store the chunks in a buffer. Runs on the staging thread."""
        for number, piece in enumerate(batch):
            for layer in layers:
                data = buffer.get((number, layer))
                assert data is not None
                self._put(epoch, piece.key, layer, data, len(piece.slots))
        self._store.commit_many(epoch, [piece.key for piece in batch])

    def shutdown(self) -> None:
        self._staging.close()
        self._memory.close()
        self.memories.pop(self._place, None)
        super().shutdown()

    # -- Suite

    def kvconform_inspector(self) -> Inspector:
        return BufferedInspector(self)


class BufferedInspector(Inspector):
    """Shows the suite the memory, too."""

    def __init__(self, connector: Buffered) -> None:
        self._connector = connector

    def cache(self) -> dict[str, Any]:
        """Return the number of prefetched values as holds, and the store as the only level."""
        stored = sum(1 for _ in self._connector._memory.list(VALUES))
        level = {"name": "store", "entries": stored, "bound": None, "held": 0}
        return {"held": len(self._connector._memory), "levels": [level]}

    def cached(self, request: Request) -> list[int]:
        """Return how many of a request's first tokens the store has."""
        connector = self._connector
        keys = connector._keys(request, [], request.num_tokens)
        stored = list(takewhile(connector._store.has, keys))
        return [len(stored) * connector.options.chunk_tokens]
