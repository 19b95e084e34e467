# SPDX-License-Identifier: Apache-2.0
"""A connector that keeps the last, incomplete chunk of a request (LMCache: save_unfull_chunk)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.keys import chunk_extras, digest, request_key
from kvconform.refimpl.paging import slots_of
from kvconform.refimpl.plan import Piece, Save

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvconform.refimpl.tracking import Tracked


class KeepsUnfullChunk(ReferenceConnector):
    """Saves what is left behind the last whole chunk, when a request has finished.

    In a step, the last chunk is incomplete because it is still to grow. The key of an incomplete
    chunk covers exactly its tokens, so the chunk has another one when it has grown.
    """

    def _stored_prefix(self, request: Request) -> int:
        found = super()._stored_prefix(request)
        return found + self._tail(request, self._keys(request, [], found), found)

    def _tail(self, request: Request, keys: Sequence[str], start: int) -> int:
        """Return the length of the longest stored incomplete chunk that begins at `start`."""
        longest = min(self.options.chunk_tokens - 1, request.num_tokens - start)
        for length in range(longest, 0, -1):
            if self._store.has(self._tail_key(request, keys, start, start + length)):
                return length
        return 0

    def _tail_key(self, request: Request, keys: Sequence[str], start: int, end: int) -> str:
        """Return the key of an incomplete chunk; `keys` are those of the whole ones before it."""
        parent = bytes.fromhex(keys[-1]) if keys else request_key(self._root, request)
        tokens = array("q", request.all_token_ids[start:end]).tobytes()
        return digest(parent, tokens, *chunk_extras(request, start, end)).hex()

    def _pieces(self, tracked: Tracked, start: int, end: int) -> tuple[Piece, ...]:
        """Cut `[start, end)`, whose last part may be of a whole chunk or an incomplete one."""
        request = tracked.request
        chunk = self.options.chunk_tokens
        behind = end - end % chunk
        whole = behind + chunk
        is_incomplete = end > behind and (
            whole > request.num_tokens
            or not self._store.has(self._keys(request, tracked.keys, whole)[behind // chunk])
        )
        if not is_incomplete:
            return super()._pieces(tracked, start, end)
        keys = self._keys(request, tracked.keys, behind)[: behind // chunk]
        length = self._tail(request, keys, behind) or end - behind
        key = self._tail_key(request, keys, behind, behind + length)
        first = max(start, behind)
        slots = slots_of(tracked.table, first, end, self._block_size)
        return (*super()._pieces(tracked, start, behind), Piece(key, first - behind, slots))

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        save = super()._plan_save(tracked, end, scheduled, final)
        chunk = self.options.chunk_tokens
        start = end - end % chunk
        is_new = start >= tracked.first * chunk and not tracked.outdated
        if not final or not self._may_save or start == end or not is_new:
            return save
        keys = self._keys(tracked.request, tracked.keys, start)[: start // chunk]
        key = self._tail_key(tracked.request, keys, start, end)
        if self._store.has(key):
            return save
        piece = Piece(key, 0, slots_of(tracked.table, start, end, self._block_size))
        table = tuple(tracked.table[: -(-end // self._block_size)])
        return replace(save, end=end, pieces=(*save.pieces, piece), table=table)
