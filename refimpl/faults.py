# SPDX-License-Identifier: Apache-2.0
"""Chunks that vanish between lookup and load, on request of the suite.

They let the suite judge how a connector handles a failed load (capability `fault_injection`).
"""

from __future__ import annotations

from collections.abc import Iterable

from kvconform.refimpl.cache.chunks import ChunkStore
from kvconform.refimpl.plan import Load


class Faults:
    """Losses of chunks, armed per request and applied to its next load."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._armed: dict[str, tuple[frozenset[int] | None, int | None]] = {}

    def arm(self, req_id: str, positions: Iterable[int] | None, rank: int | None = None) -> None:
        """Lose the chunks of the next load that hold these token positions; None: all of them.

        With `rank`, lose only that rank's shards.
        """
        self._armed[req_id] = None if positions is None else frozenset(positions), rank

    def disarm(self, req_id: str) -> None:
        """Cancel what is armed for a request, if anything."""
        self._armed.pop(req_id, None)

    def strike(self, load: Load) -> Load:
        """Drop the armed chunks of a planned load from the store; return the load unchanged."""
        positions, rank = self._armed.pop(load.req, (frozenset(), None))
        low = load.start
        for piece in load.pieces:
            high = low + len(piece.slots)
            if positions is None or not positions.isdisjoint(range(low, high)):
                self._store.drop(piece.key, rank)
            low = high
        return load
