# SPDX-License-Identifier: Apache-2.0
"""The reference connector with one small change each, which snapshots must show and name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.paging import read_slots


class OneField(ReferenceConnector):
    """A field of the metadata has another value."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta: Any = super().build_connector_meta(scheduler_output)
        return replace(meta, repaired=frozenset({29}))


class OneStepEarly(ReferenceConnector):
    """A block is saved in the step before the one that completes it."""

    def _save_bound(self, request: Any, computed: int, scheduled: int) -> int:
        return self._worth_saving(request, computed + scheduled + (scheduled == 1))


class OneByte(ReferenceConnector):
    """One element of one head of each first token of a chunk is off by one."""

    def _save_layer(self, epoch: int, save: Any, layer: str, kv_layer: Any) -> None:
        for piece in save.pieces:
            data = np.frombuffer(
                read_slots(kv_layer, piece.slots, self._share), dtype=np.float32
            ).copy()
            rows = data.reshape(len(piece.slots), 2, -1)
            rows[0, 1, 3] = (rows[0, 1, 3] + 1) % 16
            self._store.put(epoch, piece.key, layer, data.tobytes())


class Unshowable(ReferenceConnector):
    """Its metadata holds a lock."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        import threading

        meta: Any = super().build_connector_meta(scheduler_output)
        object.__setattr__(meta, "guard", threading.Lock())
        return meta
