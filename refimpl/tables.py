# SPDX-License-Identifier: Apache-2.0
"""The block tables of one KV cache group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from kvconform.refimpl.paging import NULL_BLOCK
from kvconform.refimpl.pool import BlockPool
from kvconform.refimpl.reach import Reach


class GroupTables:
    """Block tables of one KV cache group.

    A table only ever grows at its end: [local hits, shared][external hits][computed here]
    [lookahead]. Entry i holds positions [i * block_size, (i + 1) * block_size); it is the null
    block where no layer of the group reads them any more. `num_cached[id]` counts the leading
    entries that are published in the prefix cache.
    """

    def __init__(
        self, number: int, reach: Reach, pool: BlockPool, most: int | None, retention: int | None
    ) -> None:
        """`most`: blocks that a request holds at most, if its window bounds them.

        `retention`: tokens between the windows that the prefix cache keeps; 0: only those where
        prompts end or part, None: all.
        """
        self.number = number
        self.reach = reach
        self.block_size = reach.block_size
        self.tables: dict[str, list[KVCacheBlock]] = {}
        self.num_cached: dict[str, int] = {}
        self._pool = pool
        self._most = most
        self._retention = retention if reach.window is not None and not reach.local else None

    def ids(self, request_id: str) -> list[int]:
        """Return the block ids of the request's whole table."""
        return [block.block_id for block in self.tables.get(request_id, ())]

    def longest_hit(self, hashes: Sequence[bytes], most: int) -> list[KVCacheBlock]:
        """Return the blocks of the longest cached prefix of at most `most` blocks.

        Cached are all blocks of it that the token behind it reads; the others are null blocks.
        """
        if self.reach.window is None:
            hits: list[KVCacheBlock] = []
            for block_hash in hashes[:most]:
                found = self._pool.get_cached_block(block_hash, (self.number,))
                if found is None:
                    break
                hits += found
            return hits
        for count in range(most, 0, -1):
            passed = self.reach.passed(count * self.block_size)
            window = [
                self._pool.get_cached_block(block_hash, (self.number,))
                for block_hash in hashes[passed:count]
            ]
            read = [block for found in window if found for block in found]
            if len(read) == len(window):
                return [self._pool.null_block] * passed + read
        return []

    def missing(self, request_id: str, tokens: int) -> int:
        """Return how many blocks the request's table lacks to hold positions [0, tokens).

        Negative if the table has more blocks.
        """
        return -(-tokens // self.block_size) - len(self.tables.get(request_id, ()))

    def demand(
        self,
        request_id: str,
        tokens: int,
        hits: Sequence[KVCacheBlock] = (),
        computed: int = 0,
        *,
        capped: bool = False,
    ) -> int:
        """Return how many free blocks it takes to hold positions [0, tokens).

        `hits` are the request's local hits, and `computed` its tokens with all hits. Hits that no
        request holds are among the free blocks. `capped`: no more than a request holds at a time.
        """
        held = len(self.tables.get(request_id, ()))
        blocks = -(-tokens // self.block_size)
        if capped and self._most is not None:
            blocks = min(blocks, self._most)
        if request_id in self.num_cached:
            return max(0, blocks - held)
        passed = self.reach.passed(computed)
        free = sum(not hit.ref_cnt and not hit.is_null for hit in hits[max(0, passed - held) :])
        return max(0, blocks - max(passed, held + len(hits))) + free

    def take_hits(self, request_id: str, hits: Sequence[KVCacheBlock], computed: int) -> None:
        """Begin the request's table with its local hits, without what `computed` tokens pass."""
        passed = self.reach.passed(computed)
        read = hits[passed:]
        self._pool.touch(read)
        self.tables[request_id] = [self._pool.null_block] * passed + [*read]
        self.num_cached[request_id] = passed + len(read)

    def take_loaded(self, request_id: str, end: int, computed: int) -> None:
        """Add blocks for external hits below position `end`, if any is read behind `computed`."""
        if self.reach.first_read(computed) < end:
            self.grow(request_id, end)

    def grow(self, request_id: str, tokens: int) -> list[KVCacheBlock]:
        """Add blocks to hold positions [0, tokens), and return them."""
        table = self.tables.setdefault(request_id, [])
        added = self._pool.get_new_blocks(max(0, self.missing(request_id, tokens)))
        table.extend(added)
        return added

    def holds_what_is_read(self, request_id: str, computed: int) -> bool:
        """Return whether the table has the blocks that the token behind `computed` tokens reads."""
        return NULL_BLOCK not in self.ids(request_id)[self.reach.passed(computed) :]

    def free_passed(self, request_id: str, computed: int) -> None:
        """Free the blocks that no token behind `computed` tokens reads, the last one first."""
        passed = self.reach.passed(computed)
        if not passed:
            return
        table = self.tables.get(request_id, [])
        freed = []
        for place in range(min(passed, len(table)) - 1, -1, -1):
            if table[place].is_null:
                break
            freed.append(table[place])
            table[place] = self._pool.null_block
        self._pool.free_blocks(freed)

    def publish(self, request: Request, tokens: int) -> None:
        """Publish the request's whole blocks below position `tokens`."""
        cached = self.num_cached.get(request.request_id, 0)
        full = tokens // self.block_size
        if full > cached:
            table = self.tables[request.request_id]
            kept = self._kept(request, range(cached, full))
            self._pool.cache_full_blocks(request, table, kept, self.block_size, self.number)
            self.num_cached[request.request_id] = full

    def _kept(self, request: Request, places: range) -> Iterable[int]:
        """Return which of these places of the table the prefix cache keeps."""
        if self._retention is None:
            return places
        ends = [request.num_prompt_tokens - 1, request.shared_prefix_boundary]
        if self._retention:
            ends += range(
                self._retention, places.stop * self.block_size + self._retention, self._retention
            )
        # A hit ends with a whole block, and needs the window before its end.
        whole = [end // self.block_size for end in ends]
        windows = [range(self.reach.passed(end * self.block_size), end) for end in whole]
        return [place for place in places if any(place in window for window in windows)]

    def pop(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request's table and return it."""
        self.num_cached.pop(request_id, None)
        return self.tables.pop(request_id, [])
