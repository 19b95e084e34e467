# SPDX-License-Identifier: Apache-2.0
"""Planted defects: connectors that mishandle a server that fails or is slow."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from kvconform.refimpl.cache.chunks import ChunkStore
from kvconform.refimpl.cache.http import HttpBackend
from kvconform.refimpl.cache.patience import Patient
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.paging import write_slots
from kvconform.refimpl.plan import Load

HASTE = 0.1
"""Seconds that are over for all loads of a step long before a server goes on."""
LONG = 60.0
"""Seconds."""


class TrustsServer(ReferenceConnector):
    """Leaves out what the server does not deliver, and does not report it."""

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        for piece in load.pieces:
            for layer in layers:
                self._load_layer(piece, layer)


class RaisesWithoutServer(ReferenceConnector):
    """Raises an error when the server does not answer."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        server = self._store.backend
        if isinstance(server, Patient) and server.is_silent:
            raise ConnectionError("the server does not answer")


class WaitsForServer(ReferenceConnector):
    """Retries a load until the server delivers it, forever if the server is gone."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loads = self._load_queue.take()
        sent, recved = super().get_finished(finished_req_ids)
        for load in loads:
            if all(self._store.has(piece.key) for piece in load.pieces):
                self._load(load, self._layers)
                recved = {*(recved or ()), load.req}
            else:
                self._load_queue.add(load, 1)
        return sent, recved


class WritesLate(ReferenceConnector):
    """Reports a slow load as failed, and lets it continue.

    The bytes are written when the server answers.
    """

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        names, done = list(layers), threading.Event()
        threading.Thread(target=self._fetch, args=(load, names, done), daemon=True).start()
        if not done.wait(HASTE):
            for piece in load.pieces:
                self._invalid |= piece.blocks(self._block_size)
                self._bad |= piece.blocks(self._block_size)

    def _fetch(self, load: Load, layers: list[str], done: threading.Event) -> None:
        patient = ChunkStore(HttpBackend(self.options.store, LONG))
        for piece in load.pieces:
            for layer in layers:
                data = patient.get(piece.key, layer)
                if data is None or not write_slots(
                    self._layers[layer], piece.slots, data, piece.first, self._share
                ):
                    return  # `done` is not set: the load counts as late
        done.set()
