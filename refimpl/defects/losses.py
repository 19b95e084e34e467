# SPDX-License-Identifier: Apache-2.0
"""Planted defects: a reset or a failed load that takes away too little, or too much."""

from __future__ import annotations

from collections.abc import Iterable

from kvconform.refimpl.cache.chunks import EPOCH
from kvconform.refimpl.cache.seal import seal
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.plan import Load


class TogglesEpoch(ReferenceConnector):
    """Has two epochs that take turns: what was in flight at the last but one reset is current."""

    def reset_cache(self) -> bool | None:
        result = super().reset_cache()
        store = self._store
        store.backend.set(EPOCH, seal(EPOCH, str(store.epoch() % 2).encode()))
        return result


class LosesAll(ReferenceConnector):
    """Empties its store when a load finds a chunk gone."""

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        before = len(self._invalid)
        super()._load(load, layers)
        if len(self._invalid) > before:
            for key in list(self._store.keys()):
                self._store.drop(key)
