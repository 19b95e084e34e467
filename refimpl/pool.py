# SPDX-License-Identifier: Apache-2.0
"""The block pool: all KV blocks, the free blocks in eviction order, and the local prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_utils import (
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request

from kvconform.compat.vllm_api import set_block_hash


class FreeQueue(FreeKVCacheBlockQueue):
    """vLLM's queue of free blocks, the next to be allocated first.

    Adds `push_front`, which the queue of older releases does not have.
    """

    def push_front(self, block: KVCacheBlock) -> None:
        """Make `block` the next to be allocated."""
        head = self.fake_free_list_head
        second = head.next_free_block
        assert second is not None
        head.next_free_block = block
        second.prev_free_block = block
        block.prev_free_block = head
        block.next_free_block = second
        self.num_free_blocks += 1


class BlockPool:
    """Blocks 0..num_blocks-1, which the KV cache groups share.

    Block 0 is the null block: it is never allocated, and its holders are not counted. A block is
    free while it has no holder (`ref_cnt` 0). A free block keeps its hash, and so its bytes, until
    it is allocated: the local prefix cache is the set of hashed blocks, free or not. Unhashed
    blocks are allocated first, the last freed before the others. Then come hashed blocks, the
    longest unused first, the tail of a request before its head.

    A connector gets the pool (bind_gpu_block_pool). It is not vLLM's BlockPool, but the attributes
    that connectors read, and the methods with which they hold blocks, have vLLM's names and types:
    blocks, free_block_queue, cached_block_hash_to_block, touch, free_blocks, ...
    """

    def __init__(
        self, num_blocks: int, caching: bool, policies: frozenset[str], block_size: int
    ) -> None:
        self.enable_caching = caching
        self.num_gpu_blocks = num_blocks
        self.hash_block_size = block_size
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_block_queue = FreeQueue(self.blocks[1:])
        # Hash with group -> blocks with these bytes, oldest first.
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        # Further hashes of a block: always empty here.
        self.cached_block_hashes_by_block: dict[int, set[bytes]] = {}
        self._all_first = "reuse-freed-first" in policies
        self._permute = "permute-blocks" in policies

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that can be allocated, hashed ones included."""
        return self.free_block_queue.num_free_blocks

    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: Sequence[int] = (0,)
    ) -> list[KVCacheBlock] | None:
        """Return the oldest cached block of each group with this hash. Changes nothing.

        None if a group has none.
        """
        blocks = []
        for group in kv_cache_group_ids:
            key = make_block_hash_with_group_id(block_hash, group)
            found = self.cached_block_hash_to_block.get_one_block(key)
            if found is None:
                return None
            blocks.append(found)
        return blocks

    def is_cached(self, block: KVCacheBlock) -> bool:
        """Return whether the prefix cache has this very block under its hash."""
        same = self.cached_block_hash_to_block._cache.get(block.block_hash)
        return block is (same.get(block.block_id) if isinstance(same, dict) else same)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Allocate `num_blocks` free blocks, each held once and without a hash.

        ValueError if fewer are free.
        """
        free = self.get_num_free_blocks()
        if num_blocks > free:
            raise ValueError(f"{num_blocks} blocks wanted, {free} are free")
        taken = [self.free_block_queue.popleft() for _ in range(num_blocks)]
        for block in taken:
            self._evict(block)
            block.ref_cnt += 1
        return taken[::-1] if self._permute else taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold these blocks once more; free ones leave the queue and keep their hash."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Release one hold on each block; the first of them will be the first to be evicted."""
        first: list[KVCacheBlock] = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt or block.is_null:
                continue
            if block.block_hash is None or self._all_first:
                first.append(block)
            else:
                self.free_block_queue.append(block)
        for block in reversed(first):
            self.free_block_queue.push_front(block)

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        places: Iterable[int],
        block_size: int,
        group: int = 0,
    ) -> None:
        """Publish blocks of `request`, but for null blocks, under its own hashes."""
        for i in places:
            if blocks[i].is_null:
                continue
            key = make_block_hash_with_group_id(request.block_hashes[i], group)
            set_block_hash(blocks[i], key, (i + 1) * block_size)
            self.cached_block_hash_to_block.insert(key, blocks[i])

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the hashes of these blocks; their holders keep them."""
        for block_id in block_ids:
            self._evict(self.blocks[block_id])

    def _evict(self, block: KVCacheBlock) -> None:
        """Remove a block from the prefix cache, if it is in it."""
        key = block.block_hash
        if key is not None:
            self.cached_block_hash_to_block.pop(key, block.block_id)
            block.reset_hash()

    def reset_prefix_cache(self) -> bool:
        """Forget every hash. False, and nothing changed, while any block is held."""
        unused = self.get_num_free_blocks() == len(self.blocks) - 1
        if unused:
            self.evict_blocks(range(len(self.blocks)))
        return unused
