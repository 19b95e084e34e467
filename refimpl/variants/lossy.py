# SPDX-License-Identifier: Apache-2.0
"""Connectors whose KV is not quite what was computed: quantised (systems.md C7), or of another context (C8)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.keys import chunk_extras, digest, request_key
from kvconform.refimpl.paging import read_slots, write_slots
from kvconform.refimpl.plan import Piece, Save

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request

LEVELS = 127


def squeeze(data: bytes) -> bytes:
    """float32 numbers as one scale and a signed byte each: a quarter of the size, off by half a level at most."""
    numbers = np.frombuffer(data, np.float32)
    scale = np.float32(max(float(np.abs(numbers).max()), 1e-30) / LEVELS)
    return scale.tobytes() + np.rint(numbers / scale).astype(np.int8).tobytes()


def unsqueeze(data: bytes) -> bytes:
    """The inverse of `squeeze`, nearly."""
    scale = np.frombuffer(data[:4], np.float32)[0]
    return (np.frombuffer(data[4:], np.int8).astype(np.float32) * scale).tobytes()


class Quantising(ReferenceConnector):
    """Stores a byte per number. Says how far off it may be."""

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {**super().kvconform_capabilities(extra_config), "lossy": 0.01}

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        if self._is_sound(save):
            for piece in save.pieces:
                self._store.put(
                    epoch, piece.key, layer, squeeze(read_slots(kv_layer, piece.slots, self._share))
                )

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        data = self._store.get(piece.key, layer)
        return data is not None and write_slots(
            self._layers[layer], piece.slots, unsqueeze(data), piece.first, self._share
        )


class Blending(ReferenceConnector):
    """Finds a chunk wherever it stands and whatever is before it: its key is its own tokens alone (CacheBlend, without the part that
    computes some of the tokens again)."""

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {
            **super().kvconform_capabilities(extra_config),
            "non_prefix_reuse": True,
            "kv_events": False,
        }

    def _keys(self, request: Request, keys: list[str], end: int) -> Sequence[str]:
        """Keys of the full chunks within [0, end); tenant, adapter and all images up to there count as ever."""
        chunk, root = self.options.chunk_tokens, request_key(self._root, request)
        for start in range(len(keys) * chunk, end - chunk + 1, chunk):
            tokens = array("q", request.all_token_ids[start : start + chunk]).tobytes()
            keys.append(digest(root, tokens, *chunk_extras(request, 0, start + chunk)).hex())
        return keys
