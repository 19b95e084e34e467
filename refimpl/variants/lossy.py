# SPDX-License-Identifier: Apache-2.0
"""Connectors that load other KV than was computed: quantised (systems.md C7), or blended (C8).

Blended KV was computed in another context.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.keys import chunk_extras, digest, request_key
from kvconform.refimpl.paging import read_slots, write_slots
from kvconform.refimpl.plan import Piece, Save

if TYPE_CHECKING:
    from vllm.v1.request import Request

LEVELS = 127


def squeeze(data: bytes, dtype: torch.dtype = torch.float32) -> bytes:
    """Quantise numbers of a data type to one scale and a signed byte each.

    The result has a quarter of the size of float32; the error is at most half a level.
    """
    numbers = torch.frombuffer(bytearray(data), dtype=dtype).to(torch.float32).numpy()
    scale = np.float32(max(float(np.abs(numbers).max()), 1e-30) / LEVELS)
    return scale.tobytes() + np.rint(numbers / scale).astype(np.int8).tobytes()


def unsqueeze(data: bytes, dtype: torch.dtype = torch.float32) -> bytes:
    """Undo `squeeze`, up to its error."""
    scale = np.frombuffer(data[:4], np.float32)[0]
    numbers = np.frombuffer(data[4:], np.int8).astype(np.float32) * scale
    return torch.from_numpy(numbers).to(dtype).view(torch.uint8).numpy().tobytes()


class Quantising(ReferenceConnector):
    """Stores a byte per number, and declares how large the error may be."""

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {**super().kvconform_capabilities(extra_config), "lossy": 0.01}

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        if self._is_sound(save):
            for piece in save.pieces:
                rows = read_slots(kv_layer, piece.slots, self._share)
                data = squeeze(rows, kv_layer.dtype)
                self._store.put(epoch, piece.key, layer, data)

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        data = self._store.get(piece.key, layer)
        if data is None:
            return False
        kv_layer = self._layers[layer]
        numbers = unsqueeze(data, kv_layer.dtype)
        return write_slots(kv_layer, piece.slots, numbers, piece.first, self._share)


class Blending(ReferenceConnector):
    """Finds a chunk at any position after any prefix: its key covers only its own tokens.

    This is CacheBlend without its recomputation of some tokens.
    """

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {
            **super().kvconform_capabilities(extra_config),
            "non_prefix_reuse": True,
            "kv_events": False,
        }

    def _keys(self, request: Request, keys: list[str], end: int) -> Sequence[str]:
        """Append the keys of the whole chunks within [0, end).

        They still cover tenant, adapter and all images up to the end of the chunk.
        """
        chunk = self.options.chunk_tokens
        root = request_key(self._root, request)
        for start in range(len(keys) * chunk, end - chunk + 1, chunk):
            tokens = array("q", request.all_token_ids[start : start + chunk]).tobytes()
            keys.append(digest(root, tokens, *chunk_extras(request, 0, start + chunk)).hex())
        return keys
