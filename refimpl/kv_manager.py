# SPDX-License-Identifier: Apache-2.0
"""The KV cache manager: the blocks that each request holds, reuses and publishes."""

from __future__ import annotations

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from kvconform.refimpl.pool import BlockPool
from kvconform.refimpl.settings import Settings


class KVManager:
    """Block tables of one KV cache group.

    A table only ever grows at its end: [local hits, shared][external hits][computed here]
    [lookahead]. Entry i holds positions [i * block_size, (i + 1) * block_size). `num_cached[id]`
    counts the leading blocks that are published in the prefix cache.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.block_size = settings.block_size
        self.enable_caching = settings.prefix_caching
        self.block_pool = BlockPool(
            settings.num_blocks, settings.prefix_caching, settings.policies, settings.block_size
        )
        self.tables: dict[str, list[KVCacheBlock]] = {}
        self.num_cached: dict[str, int] = {}
        self.empty_kv_cache_blocks = KVCacheBlocks(((),))

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return the request's whole table, a live view; empty if it holds no blocks."""
        table = self.tables.get(request_id)
        return KVCacheBlocks((table,)) if table else self.empty_kv_cache_blocks

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the block ids of the request's whole table: one list, for the one group."""
        return ([block.block_id for block in self.tables.get(request_id, ())],)

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """Return the longest cached prefix: (blocks, their tokens, 0).

        Whole blocks only, without the last token: it must be computed for its logits.
        """
        hits: list[KVCacheBlock] = []
        if self.enable_caching and not request.skip_reading_prefix_cache:
            for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
                found = self.block_pool.get_cached_block(block_hash)
                if found is None:
                    break
                hits += found
        blocks = KVCacheBlocks((hits,)) if hits else self.empty_kv_cache_blocks
        return blocks, len(hits) * self.block_size, 0

    def missing_blocks(self, request_id: str, tokens: int) -> int:
        """Return how many blocks the request's table lacks to hold positions [0, tokens).

        Negative if the table has more blocks.
        """
        return -(-tokens // self.block_size) - len(self.tables.get(request_id, ()))

    def blocks_to_complete(self, request: Request) -> int:
        """Return how many blocks the request lacks to hold all its known tokens.

        With speculative decoding, also one verification step.
        """
        settings = self.settings
        tokens = min(request.num_tokens, settings.max_model_len)
        if settings.num_spec:
            tokens += 1 + settings.num_spec + settings.num_lookahead
        return max(0, self.missing_blocks(request.request_id, tokens))

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

        Returns the new blocks at the table's end, without the hits; None, and nothing changed, if
        there is no room. Whole blocks of known tokens are published at once, before they are
        computed or loaded, unless `delay_cache_blocks` is set (asynchronous loads).
        """
        request_id = request.request_id
        max_len = self.settings.max_model_len
        local = request.num_computed_tokens + num_new_computed_tokens
        total = min(local + num_external_computed_tokens, max_len)
        slots = min(total + num_new_tokens + num_lookahead_tokens, max_len)
        wanted = self.missing_blocks(request_id, slots)
        hits = new_computed_blocks.blocks[0] if new_computed_blocks is not None else ()
        is_admission = request.status != RequestStatus.RUNNING

        if wanted > 0 or is_admission:
            # Hits that no request holds are among the free blocks.
            free_hits = sum(block.ref_cnt == 0 for block in hits)
            spare = self.block_pool.get_num_free_blocks() - free_hits
            if has_scheduled_reqs and is_admission:
                spare -= self.settings.watermark_blocks
            whole = 0
            if full_sequence_must_fit:
                whole = self.missing_blocks(request_id, min(request.num_tokens, max_len))
            if max(0, whole - len(hits)) > spare:
                return None
            if max(0, wanted - len(hits)) > spare - reserved_blocks:
                return None

        table = self.tables.setdefault(request_id, [])
        if hits:
            self.block_pool.touch(hits)
            table.extend(hits)
            self.num_cached[request_id] = len(hits)
        if num_external_computed_tokens > 0:
            loaded = self.missing_blocks(request_id, local + num_external_computed_tokens)
            table.extend(self.block_pool.get_new_blocks(max(0, loaded)))
        added = self.block_pool.get_new_blocks(max(0, self.missing_blocks(request_id, slots)))
        table.extend(added)
        if not delay_cache_blocks:
            self.cache_blocks(request, min(total + num_new_tokens, request.num_tokens))
        return KVCacheBlocks((added,)) if added else self.empty_kv_cache_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Publish the request's whole blocks below position `num_tokens`."""
        cached = self.num_cached.get(request.request_id, 0)
        full = num_tokens // self.block_size
        if self.enable_caching and full > cached:
            self.block_pool.cache_full_blocks(
                request, self.tables[request.request_id], cached, full, self.block_size
            )
            self.num_cached[request.request_id] = full

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Forget the request's table and return it. The caller frees it, last block first."""
        self.num_cached.pop(request.request_id, None)
        return self.tables.pop(request.request_id, [])

    def free(self, request: Request) -> None:
        """Release the request's blocks, last block first."""
        self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request)))
