# SPDX-License-Identifier: Apache-2.0
"""Tests of the reference engine's block pool as a connector written for vLLM's pool reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.v1.core.block_pool import BlockPool as VllmPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from core_rig import ROUND_TRIP, check_ok, run_case
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.pool import BlockPool

READ = (
    "blocks",
    "null_block",
    "num_gpu_blocks",
    "enable_caching",
    "hash_block_size",
    "free_block_queue",
    "cached_block_hash_to_block",
)


class WalksThePool(ReferenceConnector):
    """A connector that looks at the prefix cache and the free blocks in every step.

    Connectors that offload what is about to be evicted do the same.
    """

    seen: list[tuple[str, int, int, int]] = []

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        assert all(
            isinstance(
                getattr(VllmPool(4, True, 4), name), type(getattr(gpu_block_pool, name)).__mro__[-2]
            )
            for name in READ
        )

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        cached, free = self._pool.cached_block_hash_to_block, self._pool.free_block_queue
        hashed = {block.block_hash for block in self._pool.blocks if block.block_hash is not None}
        assert all(cached.get_one_block(key).block_hash == key for key in hashed)
        walked, node = 0, free.fake_free_list_head.next_free_block
        while node is not free.fake_free_list_tail:
            walked, node = walked + 1, node.next_free_block
        self.seen.append(
            (
                type(self._pool).__module__,
                len(hashed),
                len(cached),
                walked - self._pool.get_num_free_blocks(),
            )
        )
        return super().build_connector_meta(scheduler_output)


@pytest.mark.parametrize("engine", ["reference", "vllm"])
def test_what_connectors_read_of_the_pool_is_there(engine: str, tmp_path: Path) -> None:
    WalksThePool.seen.clear()
    check_ok(run_case(f"{__name__}:WalksThePool", ROUND_TRIP, tmp_path, engine=engine))
    assert {row[0].split(".")[0] for row in WalksThePool.seen} == {
        "kvconform" if engine == "reference" else "vllm"
    }
    assert all(hashed == cached and not rest for _, hashed, cached, rest in WalksThePool.seen)
    assert max(hashed for _, hashed, _, _ in WalksThePool.seen) > 0


def test_blocks_with_one_hash_are_told_apart() -> None:
    pool = BlockPool(6, True, frozenset(), 4)
    taken = pool.get_new_blocks(3)
    key = make_block_hash_with_group_id(b"h", 0)  # type: ignore[arg-type]
    for block in taken[:2]:
        block._block_hash = key
    pool.cached_block_hash_to_block.insert(key, taken[0])
    assert [pool.is_cached(block) for block in taken] == [True, False, False]
    pool.cached_block_hash_to_block.insert(key, taken[1])
    assert [pool.is_cached(block) for block in taken] == [True, True, False]
    assert pool.get_cached_block(b"h") == [taken[0]]
    pool.evict_blocks([taken[0].block_id])
    assert [pool.is_cached(block) for block in taken] == [False, True, False]
    assert pool.get_cached_block(b"h") == [taken[1]]


def test_unhashed_blocks_are_handed_out_first() -> None:
    pool = BlockPool(6, True, frozenset(), 4)
    pool.free_blocks(reversed(pool.get_new_blocks(2)))
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == [
        2,
        1,
        3,
        4,
        5,
    ]
    pool.touch([pool.blocks[1]])
    assert pool.get_num_free_blocks() == 4
    assert [block.block_id for block in pool.get_new_blocks(4)] == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="1 blocks wanted, 0 are free"):
        pool.get_new_blocks(1)
