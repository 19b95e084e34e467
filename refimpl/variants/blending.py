# SPDX-License-Identifier: Apache-2.0
"""A connector that loads KV which was computed in another context (systems.md C8)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.keys import chunk_extras, digest, request_key

if TYPE_CHECKING:
    from vllm.v1.request import Request


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
