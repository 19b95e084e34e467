# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill between engines of different block sizes, whose KV is copied by token."""

from __future__ import annotations

from typing import Any

from kvconform.refimpl.paging import blocks_first, slots_of
from kvconform.refimpl.variants.peer import Board, Offer, Peer, Pull


class Converting(Peer):
    """Pulls from producers of any block size. Its options are those of `Peer`."""

    @staticmethod
    def _form(board: Board) -> tuple[Any, ...]:
        return Peer._form(board)[1:]

    def _size_of(self, board: Board) -> int:
        """Return the tokens per block of a producer that one of its ranks has."""
        return board.block_size // board.slices

    def _start(self, pull: Pull, size: int) -> int:
        """Return the first token to load, from a producer with `size` tokens per block."""
        return pull.first * (self._size // self._slices)

    def _copy(self, pull: Pull, offer: Offer) -> None:
        """Copy the tokens, and notify the producer that its blocks are no longer needed."""
        board = self.boards[pull.engine][self._rank]
        size, own = self._size_of(board), self._size // self._slices
        start = self._start(pull, size)
        end = min(start + len(pull.blocks) * own, len(offer.blocks) * size)
        source = slots_of(offer.blocks, start, end, size)
        target = slots_of(pull.blocks, 0, len(source), own)
        for name, layer in self.board.layers.items():
            mine, theirs = blocks_first(layer), blocks_first(board.layers[name])
            for to, of in zip(target, source, strict=True):
                row = theirs[of // theirs.shape[2], :, of % theirs.shape[2]]
                mine[to // mine.shape[2], :, to % mine.shape[2]] = row
        self._invalid |= set(pull.blocks[-(-len(source) // own) :])
        if self.notes:
            board.done.append(pull.key)
