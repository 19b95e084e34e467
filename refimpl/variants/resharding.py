# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill between engines that split the heads over different numbers of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvconform.refimpl.variants.peer import Board, Offer, Peer, Pull

if TYPE_CHECKING:
    import torch


class Resharding(Peer):
    """Pulls from producers with one rank or as many as its own engine, or into one rank.

    A producer's rank may be read by several ranks of the consumer, of which each but the first one
    takes `behind` polls more. It keeps its blocks until all of them have read them. The other
    options are those of `Peer`.
    """

    readers: ClassVar[dict[tuple[str, int], set[int]]] = {}
    """Ranks of the consumer that have read an offer, by its key and the producer's rank."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.delay += extra.get("behind", 0) if self._rank else 0

    def _reads(self, board: Board) -> bool:
        if board.ranks == self._ranks:
            return super()._reads(board)
        mine, theirs = self._form(self.board), self._form(board)
        splits_heads = 1 in (board.ranks, self._ranks) and self._slices == board.slices == 1
        return splits_heads and (mine[0], *mine[2:]) == (theirs[0], *theirs[2:])

    def _copy(self, pull: Pull, offer: Offer) -> None:
        boards = self.boards[pull.engine]
        if len(boards) == self._ranks:
            super()._copy(pull, offer)
            return
        source = offer.blocks[pull.first : pull.first + len(pull.blocks)]
        for rank, board in boards.items():
            for name, pages in self.board.pages.items():
                for mine, theirs in zip(pull.blocks, source, strict=False):
                    to, of = _of_same_heads(
                        pages[mine], board.pages[name][theirs], self._rank, rank
                    )
                    to[:] = of
            self._note(pull, rank, board)
        self._invalid |= set(pull.blocks[len(source) :])

    def _note(self, pull: Pull, rank: int, board: Board) -> None:
        """Notify a rank of the producer, if this is the last rank that reads from it."""
        read = self.readers.setdefault((pull.key, rank), set())
        read.add(self._rank)
        if len(read) == self._ranks:
            del self.readers[pull.key, rank]
            board.done.append(pull.key)


def _of_same_heads(
    mine: torch.Tensor, theirs: torch.Tensor, my_rank: int, their_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts of two blocks that have the same heads; one of them has all heads."""
    sizes = list(zip(mine.shape, theirs.shape, strict=True))
    axis = next((axis for axis, (to, of) in enumerate(sizes) if to != of), None)
    if axis is None:  # the layer has one head, which every rank has
        return mine, theirs
    to, of = sizes[axis]
    if to < of:
        return mine, theirs.narrow(axis, my_rank * to, to)
    return mine.narrow(axis, their_rank * of, of), theirs
