# SPDX-License-Identifier: Apache-2.0
"""The KV cache manager: which blocks a request holds, what it may reuse, what it may publish."""

from __future__ import annotations

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from kvconform.refimpl.pool import BlockPool
from kvconform.refimpl.settings import Settings


class KVManager:
    """Block tables of one KV cache group.

    A table grows at its end and never changes otherwise: [local hits, shared][external hits][computed here][lookahead]. Entry i holds
    positions [i * block_size, (i + 1) * block_size). `num_cached[id]` counts the leading blocks that are published in the prefix cache.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.block_size, self.enable_caching = (
            settings,
            settings.block_size,
            settings.prefix_caching,
        )
        self.block_pool = BlockPool(
            settings.num_blocks, settings.prefix_caching, settings.policies, settings.block_size
        )
        self.tables: dict[str, list[KVCacheBlock]] = {}
        self.num_cached: dict[str, int] = {}
        self.empty_kv_cache_blocks = KVCacheBlocks(((),))

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's whole table, a live view. Empty for a request that holds nothing."""
        table = self.tables.get(request_id)
        return KVCacheBlocks((table,)) if table else self.empty_kv_cache_blocks

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids of the request's whole table, one list: there is one group."""
        return ([block.block_id for block in self.tables.get(request_id, ())],)

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """The longest cached prefix: (blocks, their tokens, 0). Whole blocks, short of the last token, which gives the logits."""
        hits: list[KVCacheBlock] = []
        if self.enable_caching and not request.skip_reading_prefix_cache:
            for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
                if (found := self.block_pool.get_cached_block(block_hash)) is None:
                    break
                hits += found
        return (
            (KVCacheBlocks((hits,)) if hits else self.empty_kv_cache_blocks),
            len(hits) * self.block_size,
            0,
        )

    def missing_blocks(self, request_id: str, tokens: int) -> int:
        """How many blocks the request's table lacks to have slots for positions [0, tokens); negative if it has more."""
        return -(-tokens // self.block_size) - len(self.tables.get(request_id, ()))

    def blocks_to_complete(self, request: Request) -> int:
        """Blocks that the request still lacks to hold all its known tokens and, with drafts, one verification step."""
        drafts = (
            1 + self.settings.num_spec + self.settings.num_lookahead
            if self.settings.num_spec
            else 0
        )
        return max(
            0,
            self.missing_blocks(
                request.request_id, min(request.num_tokens, self.settings.max_model_len) + drafts
            ),
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
        """Slots for the request's hits, `num_new_tokens` and the lookahead: the new blocks at the table's end, None if there is no room.

        Either everything is granted or nothing changes. Whole blocks of known tokens are published at once, before anything is computed or
        loaded, unless `delay_cache_blocks` (asynchronous loads).
        """
        request_id, max_len = request.request_id, self.settings.max_model_len
        local = request.num_computed_tokens + num_new_computed_tokens
        total = min(local + num_external_computed_tokens, max_len)
        slots = min(total + num_new_tokens + num_lookahead_tokens, max_len)
        wanted = self.missing_blocks(request_id, slots)
        hits = new_computed_blocks.blocks[0] if new_computed_blocks is not None else ()
        admission = request.status != RequestStatus.RUNNING

        if wanted > 0 or admission:
            # Hits that nobody holds come out of the free blocks too.
            spare = self.block_pool.get_num_free_blocks() - sum(
                block.ref_cnt == 0 for block in hits
            )
            spare -= self.settings.watermark_blocks if has_scheduled_reqs and admission else 0
            whole = (
                self.missing_blocks(request_id, min(request.num_tokens, max_len))
                if full_sequence_must_fit
                else 0
            )
            if (
                max(0, whole - len(hits)) > spare
                or max(0, wanted - len(hits)) > spare - reserved_blocks
            ):
                return None

        table = self.tables.setdefault(request_id, [])
        if hits:
            self.block_pool.touch(hits)
            table.extend(hits)
            self.num_cached[request_id] = len(hits)
        if num_external_computed_tokens > 0:
            table.extend(
                self.block_pool.get_new_blocks(
                    max(0, self.missing_blocks(request_id, local + num_external_computed_tokens))
                )
            )
        added = self.block_pool.get_new_blocks(max(0, self.missing_blocks(request_id, slots)))
        table.extend(added)
        if not delay_cache_blocks:
            self.cache_blocks(request, min(total + num_new_tokens, request.num_tokens))
        return KVCacheBlocks((added,)) if added else self.empty_kv_cache_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Publish the request's whole blocks below position `num_tokens`."""
        cached, full = self.num_cached.get(request.request_id, 0), num_tokens // self.block_size
        if self.enable_caching and full > cached:
            self.block_pool.cache_full_blocks(
                request, self.tables[request.request_id], cached, full, self.block_size
            )
            self.num_cached[request.request_id] = full

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Forget the request's table and return it, still held. The caller frees it, last block first."""
        self.num_cached.pop(request.request_id, None)
        return self.tables.pop(request.request_id, [])

    def free(self, request: Request) -> None:
        """Release the request's blocks, last block first."""
        self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request)))
