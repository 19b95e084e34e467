# SPDX-License-Identifier: Apache-2.0
"""Planted defects of a connector that reuses chunks behind other tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kvconform.refimpl.keys import digest
from kvconform.refimpl.variants.blending import Blending


class FindsOtherTokens(Blending):
    """Makes a chunk's key of its first token only."""

    def _keys(self, request: Any, keys: list[str], end: int) -> Sequence[str]:
        chunk = self.options.chunk_tokens
        for start in range(len(keys) * chunk, end - chunk + 1, chunk):
            first = array("q", request.all_token_ids[start : start + 1]).tobytes()
            keys.append(digest(self._root, first).hex())
        return keys


class KeepsPositions(Blending):
    """Copies the keys of a chunk as they are, wherever its tokens are found."""

    def _turn(self, layer: str, slots: Sequence[int], by: int) -> None:
        pass


class TurnsBack(Blending):
    """Turns keys by the right distance in the wrong direction."""

    def _turn(self, layer: str, slots: Sequence[int], by: int) -> None:
        super()._turn(layer, slots, -by)


class RecomputesNothing(Blending):
    """Declares that a part of the tokens is computed again, and claims all that it finds."""

    def _first_reused(self, request: Any, found: int) -> int | None:
        return None


class BlendsTenants(Blending):
    """Makes a chunk's key of its own tokens, and not of the request's cache salt."""

    def _keys(self, request: Any, keys: list[str], end: int) -> Sequence[str]:
        chunk = self.options.chunk_tokens
        for start in range(len(keys) * chunk, end - chunk + 1, chunk):
            tokens = array("q", request.all_token_ids[start : start + chunk]).tobytes()
            keys.append(digest(self._root, tokens).hex())
        return keys
