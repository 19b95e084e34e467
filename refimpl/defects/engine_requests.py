# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine's scheduler: what it tells of its requests, and what their blocks are called."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request

from kvconform.engine.worker import Worker
from kvconform.refimpl import admission, scheduler
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.faulty import connector_of, fault, nothing
from kvconform.refimpl.pool import BlockPool


@fault(Engine, "add_request")
def announces_twice(add: Any, engine: Engine, request: Request) -> None:
    """Announces a request twice."""
    add(engine, request)
    if engine.connector is not None:
        engine.connector.on_new_request(request)


@fault(Engine, "add_request")
def _says_nothing_yet(add: Any, engine: Engine, request: Request) -> None:
    """Announces a request when it has been looked up."""
    with connector_of(engine, on_new_request=nothing):
        add(engine, request)


@_says_nothing_yet.and_(admission, "_look_up")
def announces_late(look_up: Any, engine: Engine, request: Request) -> Any:
    found, announced = look_up(engine, request), engine.__dict__.setdefault("_announced", set())
    if engine.connector is not None and id(request) not in announced:
        announced.add(id(request))
        engine.connector.on_new_request(request)
    return found


@fault(admission, "_look_up")
def hashes_prompts_only(look_up: Any, engine: Engine, request: Request) -> Any:
    """Shows hashes of the prompt's blocks only when it looks a request up that has generated tokens."""

    def without(original: Any, asked: Request, local: int) -> Any:
        known = asked.block_hashes
        asked.block_hashes = known[: asked.num_prompt_tokens // engine.settings.block_size]
        try:
            return original(asked, local)
        finally:
            asked.block_hashes = known

    with connector_of(engine, get_num_new_matched_tokens=without):
        return look_up(engine, request)


@fault(Request, "update_block_hashes")
def hashes_by_request(update: Any, request: Request) -> None:
    """Puts the request's id into the hashes of its blocks: nobody finds them again."""
    known = len(request.block_hashes)
    update(request)
    for index in range(known, len(request.block_hashes)):
        request.block_hashes[index] = type(request.block_hashes[index])(
            _mixed(request.block_hashes[index], request.request_id.encode())
        )


@fault(Request, "update_block_hashes")
def hashes_without_salt(update: Any, request: Request) -> None:
    """Leaves the salt out of the hashes (B076)."""
    salt, request.cache_salt = request.cache_salt, None
    update(request)
    request.cache_salt = salt


def _mixed(key: bytes, more: bytes) -> bytes:
    return bytes(byte ^ more[index % len(more)] for index, byte in enumerate(key))


@fault(scheduler, "build_output")
def repeats_tokens(build: Any, engine: Engine, step: Any) -> Any:
    """Sends the last token of every running request along, as until model runners kept the tokens themselves."""
    output = build(engine, step)
    cached = output.scheduled_cached_reqs
    cached.new_token_ids = [
        list(engine.requests[request_id].all_token_ids)[-1:] for request_id in cached.req_ids
    ]
    return output


@fault(scheduler, "build_output")
def computes_nothing_after_a_full_load(build: Any, engine: Engine, step: Any) -> Any:
    """Says of a request that was loaded as a whole that all its tokens are computed, though it computes the last one again."""
    output = build(engine, step)
    for new in output.scheduled_new_reqs:
        request = engine.requests[new.req_id]
        new.num_computed_tokens += (
            new.num_computed_tokens > 0 and new.num_computed_tokens == request.num_tokens - 1
        )
    return output


@fault(scheduler, "admit_waiting")
def passes_new_blocks_only(admit: Any, engine: Engine, step: Any) -> None:
    """Passes the blocks behind the local hit to update_state_after_alloc, as until 0.14."""
    local: dict[str, int] = {}

    def asked(original: Any, request: Request, count: int) -> Any:
        local[request.request_id] = count // engine.settings.block_size
        return original(request, count)

    def granted(original: Any, request: Request, blocks: Any, external: int) -> None:
        original(
            request,
            KVCacheBlocks((blocks.blocks[0][local.get(request.request_id, 0) :],)),
            external,
        )

    with connector_of(engine, get_num_new_matched_tokens=asked, update_state_after_alloc=granted):
        admit(engine, step)


@fault(BlockPool, "get_new_blocks")
def finds_what_was_overwritten(take: Any, pool: BlockPool, count: int) -> Any:
    """Leaves a block in the prefix cache when it hands it out: whoever finds it there reads what came after."""
    before = {
        block.block_id: block.block_hash for block in pool.free_block_queue.get_all_free_blocks()
    }
    taken = take(pool, count)
    for block in taken:
        if (key := before[block.block_id]) is not None:
            pool.cached_block_hash_to_block.insert(key, block)
    return taken


@fault(Worker, "write_layer")
def leaves_a_token_out(write: Any, worker: Worker, layer: int) -> None:
    """Does not write the KV of the last token of a step's first chunk."""
    slot = worker.rows[0].by_group[0][-1:]
    before = worker.cache.read(layer, slot).numpy().copy()
    write(worker, layer)
    if worker.rows[0].count > 1:
        worker.cache.write(layer, slot, before)


@fault(scheduler, "admit_waiting")
def passes_blocks_in_another_order(admit: Any, engine: Engine, step: Any) -> None:
    """Passes the blocks of a load first, and those of the local hit behind them."""
    local: dict[str, int] = {}

    def asked(original: Any, request: Request, count: int) -> Any:
        local[request.request_id] = count // engine.settings.block_size
        return original(request, count)

    def granted(original: Any, request: Request, blocks: Any, external: int) -> None:
        hit = local.get(request.request_id, 0)
        original(
            request, KVCacheBlocks(([*blocks.blocks[0][hit:], *blocks.blocks[0][:hit]],)), external
        )

    with connector_of(engine, get_num_new_matched_tokens=asked, update_state_after_alloc=granted):
        admit(engine, step)
