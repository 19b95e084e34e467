# SPDX-License-Identifier: Apache-2.0
"""Chunks that vanish between lookup and load, on demand: so the suite can see what a connector does about it (capability
``fault_injection``)."""

from __future__ import annotations

from collections.abc import Iterable

from kvconform.refimpl.plan import Load
from kvconform.refimpl.store import Store


class Faults:
    """Armed per request, spent by its next load."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._armed: dict[str, frozenset[int] | None] = {}

    def arm(self, req_id: str, positions: Iterable[int] | None) -> None:
        """Lose the chunks that hold these token positions; None: all chunks of the load."""
        self._armed[req_id] = None if positions is None else frozenset(positions)

    def disarm(self, req_id: str) -> None:
        self._armed.pop(req_id, None)

    def strike(self, load: Load) -> Load:
        """Called with every planned load; returns it."""
        positions = self._armed.pop(load.req, frozenset())
        low = load.start
        for piece in load.pieces:
            high = low + len(piece.slots)
            if positions is None or not positions.isdisjoint(range(low, high)):
                self._store.drop(piece.key)
            low = high
        return load
