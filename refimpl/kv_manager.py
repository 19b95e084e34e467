# SPDX-License-Identifier: Apache-2.0
"""The KV cache manager: the blocks that each request holds, reuses and publishes."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from kvconform.refimpl.pool import BlockPool
from kvconform.refimpl.settings import Settings
from kvconform.refimpl.tables import GroupTables


class KVManager:
    """Block tables of the KV cache groups of a model, over one pool of blocks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.block_size = settings.block_size
        self.enable_caching = settings.prefix_caching
        self.block_pool = BlockPool(
            settings.num_blocks, settings.prefix_caching, settings.policies, settings.block_size
        )
        self.groups = [
            GroupTables(
                number,
                reach,
                self.block_pool,
                reach.most_blocks(settings.most_in_flight, settings.max_model_len),
                settings.retention,
            )
            for number, reach in enumerate(settings.groups)
        ]
        # The groups whose hits show where prompts part: all with full attention, or those alike.
        first = min(self.groups, key=lambda group: group.reach.window is not None)
        self._first = [group.number for group in self.groups if group.reach == first.reach]
        self.empty_kv_cache_blocks = KVCacheBlocks(((),) * len(self.groups))

    def _blocks(self, blocks: tuple[list[KVCacheBlock], ...]) -> KVCacheBlocks:
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return the request's whole tables, a live view; empty if it holds no blocks."""
        return self._blocks(tuple(group.tables.get(request_id, []) for group in self.groups))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the block ids of the request's whole tables, one list per group."""
        return tuple([group.ids(request_id) for group in self.groups])

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """Return the longest prefix that is cached for all groups.

        Returns (blocks, its tokens, tokens of a longer one that full attention has cached, or 0).
        Whole blocks only, without the last token: it must be computed for its logits.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0, 0
        count = (request.num_tokens - 1) // self.block_size
        longest = 0
        while True:
            hits = tuple([group.longest_hit(request.block_hashes, count) for group in self.groups])
            longest = longest or min(len(hits[number]) for number in self._first)
            count = min(map(len, hits))
            if all(len(each) == count for each in hits):
                apart = longest * self.block_size if longest > count else 0
                return self._blocks(hits), count * self.block_size, apart

    def blocks_to_complete(self, request: Request) -> int:
        """Return how many blocks the request lacks to hold all its known tokens.

        With speculative decoding, also one verification step.
        """
        settings = self.settings
        tokens = min(request.num_tokens, settings.max_model_len)
        if settings.num_spec:
            tokens += 1 + settings.num_spec + settings.num_lookahead
        computed = request.num_computed_tokens
        return sum(
            group.demand(request.request_id, tokens, computed=computed, capped=True)
            for group in self.groups
        )

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """Allocate slots for the request's hits, `num_new_tokens` and the lookahead.

        Returns the new blocks at the tables' ends, without the hits; None, and nothing changed but
        for blocks that a window has passed, if there is no room. Whole blocks of known tokens are
        published at once, before they are computed or loaded, unless `delay_cache_blocks` is set
        (asynchronous loads).
        """
        request_id = request.request_id
        max_len = self.settings.max_model_len
        local = request.num_computed_tokens + num_new_computed_tokens
        total = min(local + num_external_computed_tokens, max_len)
        slots = min(total + num_new_tokens + num_lookahead_tokens, max_len)
        # The last token of a prompt that is loaded as a whole is computed again.
        resumes_at = min(local + num_external_computed_tokens, request.num_tokens - 1)
        if new_computed_blocks is None:
            new_computed_blocks = self.empty_kv_cache_blocks
        hits = new_computed_blocks.blocks

        above_watermark = 0
        if has_scheduled_reqs and request.status != RequestStatus.RUNNING:
            above_watermark = self.settings.watermark_blocks
        if full_sequence_must_fit:
            whole = min(request.num_tokens, max_len)
            demand = self._demand(request_id, whole, hits, resumes_at, capped=True)
            if demand + above_watermark > self.block_pool.get_num_free_blocks():
                return None
        self.free_passed(request, total)
        demand = self._demand(request_id, slots, hits, resumes_at)
        if demand + above_watermark + reserved_blocks > self.block_pool.get_num_free_blocks():
            return None

        # A request whose only token was loaded is looked up once more, with its blocks.
        if request_id not in self.groups[0].num_cached:
            # The hits of all groups are held before any group is given blocks, which may evict.
            for group, found in zip(self.groups, hits, strict=True):
                group.take_hits(request_id, found, resumes_at)
            if num_external_computed_tokens > 0:
                for group in self.groups:
                    group.take_loaded(request_id, local + num_external_computed_tokens, resumes_at)
        added = tuple([group.grow(request_id, slots) for group in self.groups])
        if not delay_cache_blocks:
            self.cache_blocks(request, min(total + num_new_tokens, request.num_tokens))
        return self._blocks(added)

    def _demand(
        self,
        request_id: str,
        tokens: int,
        hits: Sequence[Sequence[KVCacheBlock]],
        computed: int,
        *,
        capped: bool = False,
    ) -> int:
        """Return how many free blocks the request takes to hold positions [0, tokens)."""
        return sum(
            group.demand(request_id, tokens, found, computed, capped=capped)
            for group, found in zip(self.groups, hits, strict=True)
        )

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Publish the request's whole blocks below position `num_tokens`."""
        if self.enable_caching:
            for group in self.groups:
                group.publish(request, num_tokens)

    def holds_what_is_read(self, request: Request) -> bool:
        """Return whether the request has the blocks that its next token reads."""
        computed = max(0, request.num_computed_tokens)
        return all(group.holds_what_is_read(request.request_id, computed) for group in self.groups)

    def free_passed(self, request: Request, computed: int) -> None:
        """Free the request's blocks that no layer reads behind `computed` tokens.

        Steps in flight still read what the window will have passed when they have landed.
        """
        landed = max(0, computed - request.num_in_flight_tokens)
        for group in self.groups:
            group.free_passed(request.request_id, landed)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Forget the request's tables and return their blocks. The caller frees the last first."""
        return [block for group in self.groups for block in group.pop(request.request_id)]

    def free(self, request: Request) -> None:
        """Release the request's blocks, group by group, the last block of each first."""
        for group in self.groups:
            self.block_pool.free_blocks(reversed(group.pop(request.request_id)))
