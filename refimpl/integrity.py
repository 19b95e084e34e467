# SPDX-License-Identifier: Apache-2.0
"""Invariants of the reference engine: blocks have owners, owners have blocks, counters make sense."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from kvconform.refimpl.errors import IntegrityError

if TYPE_CHECKING:
    from kvconform.refimpl.engine import Engine


def check_integrity(engine: Engine) -> None:
    """Raise IntegrityError for the first invariant that does not hold. Valid between steps; a connector's own holds (touch) are allowed."""
    _check_blocks(engine)
    places = Counter(r.request_id for queue in (engine.running, engine.waiting, engine.kv_holding_waiting) for r in queue)
    for request_id in (places.keys() | engine.kv_cache_manager.tables.keys()) - engine.requests.keys():
        raise IntegrityError(f"request {request_id}", "is queued or holds blocks and does not exist")
    for request in engine.requests.values():
        _check_request(engine, request, places[request.request_id])


def _check_blocks(engine: Engine) -> None:
    pool, tables = engine.kv_cache_manager.block_pool, engine.kv_cache_manager.tables
    owners = Counter(block.block_id for table in tables.values() for block in table)
    owners.update(block.block_id for _, blocks in engine.deferred_frees for block in blocks)
    queue = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
    for block in pool.blocks[1:]:
        name, free, owned = f"block {block.block_id}", block.block_id in queue, owners[block.block_id]
        if free != (block.ref_cnt == 0) or block.ref_cnt < owned:
            raise IntegrityError(name, f"held {block.ref_cnt} times, in {owned} tables, {'' if free else 'not '}in the free queue")
        if block.block_hash is not None and not pool.is_cached(block):
            raise IntegrityError(name, "has a hash that the prefix cache does not know")
        # Two requests share a block through the prefix cache only; a block leaves it while held only when a load fails for good.
        if owned > 1 and block.block_hash is None and engine.settings.recompute_failed_loads:
            raise IntegrityError(name, f"shared by {owned} requests without being cached")
    if owners[0] or 0 in queue:
        raise IntegrityError("block 0", "the null block was handed out")


def _check_request(engine: Engine, request: Request, places: int) -> None:
    name, manager = f"request {request.request_id}", engine.kv_cache_manager
    table, cached = manager.tables.get(request.request_id, []), manager.num_cached.get(request.request_id, 0)
    computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
    in_flight, stale = request.num_in_flight_tokens, request.num_stale_output_tokens
    wrong = {
        f"{request.status.name}, in {places} queues": places != (not request.is_finished()),
        f"in the running list as {request.status.name}": request in engine.running and request.status != RequestStatus.RUNNING,
        f"holds a block twice: {[block.block_id for block in table]}": len({block.block_id for block in table}) != len(table),
        f"{computed} computed tokens in {len(table)} blocks": not request.is_finished() and computed > len(table) * manager.block_size,
        f"{cached} blocks published of {len(table)}, {len(request.block_hashes)} hashes": cached
        > min(len(table), len(request.block_hashes)),
        f"{placeholders} placeholders, {in_flight} tokens in flight, {stale} of them stale": min(placeholders, in_flight, stale) < 0,
        f"{placeholders} placeholders though scheduling is synchronous": placeholders and not engine.settings.is_async,
        # With a connector, a negative answer to a lookup (R025) gets here.
        f"{computed} computed tokens": computed < 0 and engine.connector is None,
    }
    for what in (what for what, holds in wrong.items() if holds):
        raise IntegrityError(name, what)
