# SPDX-License-Identifier: Apache-2.0
"""Planted defects: codecs that lose more than the connector declares. Options: a `codec`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvconform.refimpl.cache.codecs import CODECS, Compressible, Quantising
from kvconform.refimpl.cache.tiers import Level
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.variants.tiers import CacheInspector, Tiered


class _OtherCodec(ReferenceConnector):
    """Stores with a codec that is not the declared one."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._codec = self._other()

    def _other(self) -> Quantising:
        raise NotImplementedError


class StoresFewerBits(_OtherCodec):
    """Declares the error of the codec that is configured, and always stores 4 bits."""

    def _other(self) -> Quantising:
        return replace(CODECS["int4"])  # type: ignore[type-var, return-value]


@dataclass(frozen=True)
class _OneGrid(Quantising):
    grids: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def _grid(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.grids.setdefault(rows.shape[1], super()._grid(rows))


class ScaleOfAnotherBlock(_OtherCodec):
    """Measures the columns of the first chunk, and quantises all others by them."""

    def _other(self) -> Quantising:
        return _OneGrid(8, 0.01)


@dataclass(frozen=True)
class _Narrow(Quantising):
    kept: float = 0.992
    """The part of a column's width that has steps."""

    def _grid(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, step = super()._grid(rows)
        return low, step * self.kept


class ClipsOutliers(_OtherCodec, Tiered):
    """Clips the ends of every column: within its tolerance, but once more whenever it stores."""

    def _other(self) -> Quantising:
        return _Narrow(8, 0.01)


class ClipsBothSigns(ClipsOutliers):
    """The same for values of both signs, whose columns are twice as wide as the largest value."""

    def _other(self) -> Quantising:
        return _Narrow(8, 0.01, kept=0.996)


class RoundsInFull(Tiered):
    """Rounds the values as its codec does, and stores each of them in full."""

    def _put(self, epoch: int, key: str, layer: str, data: bytes, tokens: int) -> None:
        dtype = self._layers[layer].dtype
        rounded = self._codec.decode(self._codec.encode(data, dtype, tokens), dtype)
        self._store.put(epoch, key, layer, Compressible().encode(rounded, dtype, tokens))


class _UncompressedInspector(CacheInspector):
    def _bytes(self, level: Level) -> int:
        return 2 * super()._bytes(level)


class CountsUncompressed(Tiered):
    """Reports the size of what it stores from before its codec halved it."""

    def kvconform_inspector(self) -> CacheInspector:
        return _UncompressedInspector(self)
