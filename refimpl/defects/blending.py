# SPDX-License-Identifier: Apache-2.0
"""Planted defects of a connector that reuses chunks behind other tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from kvconform.refimpl.keys import chunk_extras, request_key
from kvconform.refimpl.plan import Save
from kvconform.refimpl.variants.blending import CONTEXT, Blending, PlacedPiece


class FindsOtherTokens(Blending):
    """Makes a chunk's key of its first token only."""

    def _parts(self, request: Any, tokens: array[int], start: int) -> Sequence[bytes | str]:
        return self._root, tokens[:1].tobytes()


class KeepsPositions(Blending):
    """Copies the keys of a chunk as they are, wherever its tokens are found."""

    def _turn(self, layer: str, slots: Sequence[int], by: int) -> None:
        pass


class TurnsBack(Blending):
    """Turns keys by the right distance in the wrong direction."""

    def _turn(self, layer: str, slots: Sequence[int], by: int) -> None:
        super()._turn(layer, slots, -by)


class MixesPositions(Blending):
    """Stores the KV of the last of the equal chunks in a step, with the position of the first."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._first: dict[str, bytes] = {}

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        super()._save_layer(epoch, save, layer, kv_layer)
        for piece in save.pieces:
            assert isinstance(piece, PlacedPiece)
            context = self._first.setdefault(piece.key, piece.context.encode())
            self._store.put(epoch, piece.key, CONTEXT, context)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self._first.clear()


class RecomputesNothing(Blending):
    """Declares that a part of the tokens is computed again, and claims all that it finds."""

    def _first_reused(self, request: Any, found: int) -> int | None:
        return None


class PlacesImagesInPrompts(Blending):
    """Says in a chunk's key where its images are in the prompt, not where they are in the chunk."""

    def _parts(self, request: Any, tokens: array[int], start: int) -> Sequence[bytes | str]:
        extras = chunk_extras(request, 0, start + len(tokens))
        return request_key(self._root, request), tokens.tobytes(), *extras


class BlendsTenants(Blending):
    """Makes a chunk's key of its own tokens, and not of the request's cache salt."""

    def _parts(self, request: Any, tokens: array[int], start: int) -> Sequence[bytes | str]:
        return self._root, tokens.tobytes()
