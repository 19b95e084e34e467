# SPDX-License-Identifier: Apache-2.0
"""Planted defects: incomplete chunks that grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvconform.refimpl.keys import digest, request_key
from kvconform.refimpl.variants.unfull import KeepsUnfullChunk

if TYPE_CHECKING:
    from vllm.v1.request import Request


class GrowsUnderItsKey(KeepsUnfullChunk):
    """Gives an incomplete chunk a key of its place and its first token (B034).

    It keeps the key when it has grown, and so has every other chunk that begins like it.
    """

    def _tail_key(self, request: Request, keys: Sequence[str], start: int, end: int) -> str:
        parent = bytes.fromhex(keys[-1]) if keys else request_key(self._root, request)
        return digest(parent, "incomplete", str(request.all_token_ids[start])).hex()
