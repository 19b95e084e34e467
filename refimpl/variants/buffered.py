# SPDX-License-Identifier: Apache-2.0
"""A connector that prefetches, batches, and uses two buffers (systems.md C4; `refimpl/cache/`).

Chunks travel between the store and two host buffers in batches, on a thread; meanwhile the other
buffer is copied into or out of the paged cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvconform.refimpl.cache.batches import batches
from kvconform.refimpl.cache.codecs import CodecError
from kvconform.refimpl.cache.staging import Buffer, Staging
from kvconform.refimpl.paging import bytes_in, read_slots, write_slots
from kvconform.refimpl.plan import Load, Piece, Save
from kvconform.refimpl.variants.prefetched import Prefetched

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

Batch = list[Piece]


class Buffered(Prefetched):
    """The reference connector with prefetch, batches and double buffering."""

    staging_kind: ClassVar[type[Staging[Batch]]] = Staging

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._staging = self.staging_kind()

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
        super().shutdown()
