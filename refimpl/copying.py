# SPDX-License-Identifier: Apache-2.0
"""How the reference connector's worker half copies: between the slots of its layers and the store, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvconform.refimpl.paging import Share, read_slots, write_slots
from kvconform.refimpl.plan import Load, Piece, Save
from kvconform.refimpl.store import Store

if TYPE_CHECKING:
    import torch


class Copying:
    """The copies of the worker half. The connector has what they need, and where they note what failed (`_invalid`, `_bad`) or was sent."""

    _store: Store
    _share: Share
    _layers: dict[str, torch.Tensor]
    _block_size: int
    _invalid: set[int]
    _bad: set[int]
    _sent: set[str]

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        """Fill the granted slots, or say which blocks could not be filled. Never less than either."""
        for piece in load.pieces:
            if not self._store.has(piece.key) or not all(
                [self._load_layer(piece, layer) for layer in layers]
            ):
                self._store.drop(piece.key)
                self._invalid |= piece.blocks(self._block_size)
                self._bad |= piece.blocks(self._block_size)

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        data = self._store.get(piece.key, layer)
        return data is not None and write_slots(
            self._layers[layer], piece.slots, data, piece.first, self._share
        )

    def _save(self, epoch: int, save: Save, layers: Iterable[str]) -> None:
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
                self._store.put(
                    epoch, piece.key, layer, read_slots(kv_layer, piece.slots, self._share)
                )

    def _is_sound(self, save: Save) -> bool:
        """KV computed upon a failed load is garbage, whichever request computed it."""
        return self._bad.isdisjoint(save.table)
