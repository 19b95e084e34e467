# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine: announcements, block hashes, and blocks passed or written wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request

from kvconform.refimpl.defects import targets
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.faulty import Fault, Target, connector_of, skipped
from kvconform.refimpl.pool import BlockPool

UPDATE_BLOCK_HASHES = Target("vllm.v1.request:Request.update_block_hashes")
CACHE_BLOCKS = Target("kvconform.refimpl.kv_manager:KVManager.cache_blocks")


@targets.ADD_REQUEST.after
def announces_twice(_: None, engine: Engine, request: Request) -> None:
    """Announce a request twice."""
    if engine.connector is not None:
        engine.connector.on_new_request(request)


@targets.LOOK_UP.after
def _announces_once(_: Any, engine: Engine, request: Request) -> None:
    announced = engine.__dict__.setdefault("_announced", set())
    if engine.connector is not None and id(request) not in announced:
        announced.add(id(request))
        engine.connector.on_new_request(request)


announces_late = targets.ADD_REQUEST.during(on_new_request=skipped) + _announces_once
"""Announce a request after its first lookup."""


@targets.LOOK_UP.replaced_by
def hashes_prompts_only(look_up: Any, engine: Engine, request: Request) -> Any:
    """Show only the hashes of the prompt's blocks in a lookup."""

    def without(original: Any, asked: Request, local: int) -> Any:
        prompt = asked.num_prompt_tokens // engine.settings.block_size
        with patch.object(asked, "block_hashes", asked.block_hashes[:prompt]):
            return original(asked, local)

    with connector_of(engine, get_num_new_matched_tokens=without):
        return look_up(engine, request)


@CACHE_BLOCKS.replaced_by
def publishes_ahead(cache: Any, manager: Any, request: Request, num_tokens: int) -> None:
    """Publish all blocks of a request, also those that its next steps compute."""
    (table,) = manager.get_block_ids(request.request_id)
    cache(manager, request, min(len(table) * manager.block_size, request.num_tokens))


@UPDATE_BLOCK_HASHES.replaced_by
def hashes_by_request(update: Any, request: Request) -> None:
    """Put the request's id into the hashes of its blocks, so that no other request finds them."""
    known = len(request.block_hashes)
    update(request)
    for index in range(known, len(request.block_hashes)):
        block_hash = request.block_hashes[index]
        mixed = _mixed(block_hash, request.request_id.encode())
        request.block_hashes[index] = type(block_hash)(mixed)


def _mixed(key: bytes, more: bytes) -> bytes:
    return bytes(byte ^ more[index % len(more)] for index, byte in enumerate(key))


@UPDATE_BLOCK_HASHES.replaced_by
def hashes_without_salt(update: Any, request: Request) -> None:
    """Leave the salt out of the block hashes (B076)."""
    with patch.object(request, "cache_salt", None):
        update(request)


@targets.BUILD_OUTPUT.after
def repeats_tokens(output: Any, engine: Engine, step: Any) -> None:
    """Send the last token of every running request.

    vLLM did so until the model runners kept the tokens themselves.
    """
    cached = output.scheduled_cached_reqs
    cached.new_token_ids = [
        list(engine.requests[request_id].all_token_ids)[-1:] for request_id in cached.req_ids
    ]


@targets.BUILD_OUTPUT.after
def computes_nothing_after_a_full_load(output: Any, engine: Engine, step: Any) -> None:
    """Count all tokens of a wholly loaded request as computed, and recompute the last one."""
    for new in output.scheduled_new_reqs:
        all_but_last = engine.requests[new.req_id].num_tokens - 1
        if 0 < all_but_last == new.num_computed_tokens:
            new.num_computed_tokens += 1


def _blocks_passed(choose: Callable[[list[Any], list[Any]], list[Any]]) -> Fault:
    """Return the fault that update_state_after_alloc gets other blocks.

    `choose` maps the blocks of the local hit, and those behind it, to the blocks that are passed.
    """

    def change(admit: Any, engine: Engine, step: Any) -> None:
        hits: dict[str, int] = {}

        def asked(original: Any, request: Request, local: int) -> Any:
            hits[request.request_id] = local // engine.settings.block_size
            return original(request, local)

        def granted(original: Any, request: Request, blocks: Any, external: int) -> None:
            table, hit = list(blocks.blocks[0]), hits.get(request.request_id, 0)
            passed = KVCacheBlocks((choose(table[:hit], table[hit:]),))
            original(request, passed, external)

        with connector_of(
            engine, get_num_new_matched_tokens=asked, update_state_after_alloc=granted
        ):
            admit(engine, step)

    return targets.ADMIT_WAITING.replaced_by(change)


passes_new_blocks_only = _blocks_passed(lambda hit, others: others)
"""Pass only the blocks behind the local hit to update_state_after_alloc, as vLLM did until 0.14."""

passes_blocks_in_another_order = _blocks_passed(lambda hit, others: [*others, *hit])
"""Pass the blocks of a load first, and those of the local hit behind them."""


@targets.GET_NEW_BLOCKS.replaced_by
def finds_what_was_overwritten(take: Any, pool: BlockPool, count: int) -> Any:
    """Keep a block in the prefix cache after its reuse: a later hit reads the new contents."""
    free = pool.free_block_queue.get_all_free_blocks()
    before = {block.block_id: block.block_hash for block in free}
    taken = take(pool, count)
    for block in taken:
        if (key := before[block.block_id]) is not None:
            pool.cached_block_hash_to_block.insert(key, block)
    return taken


@targets.WRITE_LAYER.replaced_by
def leaves_a_token_out(write: Any, worker: Any, layer: int) -> None:
    """Do not write the KV of the last token of a step's first chunk."""
    slot = worker.rows[0].by_group[0][-1:]
    before = worker.cache.read(layer, slot).numpy().copy()
    write(worker, layer)
    if worker.rows[0].count > 1:
        worker.cache.write_rows(layer, slot, before)
