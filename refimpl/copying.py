# SPDX-License-Identifier: Apache-2.0
"""Copies of the reference connector's worker half: between its layers' slots and the store."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from kvconform.refimpl.cache.chunks import ChunkStore
from kvconform.refimpl.cache.codecs import Codec, CodecError
from kvconform.refimpl.paging import Share, bytes_in, read_slots, write_slots
from kvconform.refimpl.plan import Load, Piece, Save

if TYPE_CHECKING:
    import torch


class Copying:
    """The copying part of the worker half.

    The connector provides the attributes. Failed blocks are noted in `_invalid` and `_bad`,
    requests whose last save is done in `_sent`.
    """

    _store: ChunkStore
    _codec: Codec
    _share: Share
    _layers: dict[str, torch.Tensor]
    _block_size: int
    _invalid: set[int]
    _bad: set[int]
    _sent: set[str]

    def _count(self, name: str, by: float = 1) -> None:
        """Add to a statistic."""
        raise NotImplementedError

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        """Fill the granted slots; note the blocks that could not be filled completely."""
        for piece in load.pieces:
            # A list, not a generator: all layers are loaded, even after one that failed.
            if not self._store.has(piece.key) or not all(
                [self._load_counted(piece, layer) for layer in layers]
            ):
                self._store.drop(piece.key)
                self._invalid |= piece.blocks(self._block_size)
                self._bad |= piece.blocks(self._block_size)

    def _load_counted(self, piece: Piece, layer: str) -> bool:
        """Do what `_load_layer` does, and count what was loaded."""
        is_loaded = self._load_layer(piece, layer)
        if is_loaded:
            self._count("bytes_loaded", bytes_in(self._layers[layer], piece.slots, self._share))
        return is_loaded

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        """Fill the piece's slots in one layer; return whether the store had the data."""
        data = self._get(piece.key, layer)
        if data is None:
            return False
        return write_slots(self._layers[layer], piece.slots, data, piece.first, self._share)

    def _save(self, epoch: int, save: Save, layers: Iterable[str]) -> None:
        """Store these layers and commit the chunks."""
        for layer in layers:
            self._save_layer(epoch, save, layer, self._layers[layer])
        if self._is_sound(save):
            for piece in save.pieces:
                self._store.commit(epoch, piece.key)
        if save.final:
            self._sent.add(save.req)

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        if self._is_sound(save):
            for piece in save.pieces:
                data = read_slots(kv_layer, piece.slots, self._share)
                self._put(epoch, piece.key, layer, data, len(piece.slots))

    def _get(self, key: str, layer: str) -> bytes | None:
        """Return one layer of a chunk, decoded; None if it is gone or damaged."""
        stored = self._store.get(key, layer)
        with suppress(CodecError):
            if stored is not None:
                return self._codec.decode(stored, self._layers[layer].dtype)
        return None

    def _put(self, epoch: int, key: str, layer: str, data: bytes, tokens: int) -> None:
        """Encode one layer of a chunk of `tokens`, and keep it until the chunk is committed."""
        encoded = self._codec.encode(data, self._layers[layer].dtype, tokens)
        self._store.put(epoch, key, layer, encoded)

    def _is_sound(self, save: Save) -> bool:
        """Return whether the KV depends on no failed load, whichever request computed it."""
        return self._bad.isdisjoint(save.table)
