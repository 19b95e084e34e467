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
    _check_queues(engine)
    for request in engine.requests.values():
        _check_request(engine, request)


def _check_blocks(engine: Engine) -> None:
    pool, tables = engine.kv_cache_manager.block_pool, engine.kv_cache_manager.tables
    for request_id in tables.keys() - engine.requests.keys():
        raise IntegrityError(f"request {request_id}", "has a block table and does not exist")
    owners: Counter[int] = Counter(block.block_id for table in tables.values() for block in table)
    owners.update(block.block_id for _, blocks in engine.deferred_frees for block in blocks)
    for block in pool.blocks[1:]:
        name, free = f"block {block.block_id}", block.block_id in pool.free_queue
        if free != (block.ref_cnt == 0):
            raise IntegrityError(name, f"held {block.ref_cnt} times and {'' if free else 'not '}in the free queue")
        if block.ref_cnt < owners[block.block_id]:
            raise IntegrityError(name, f"in {owners[block.block_id]} tables and held {block.ref_cnt} times")
        if owners[block.block_id] > 1 and block.block_hash is None and pool.enable_caching and not engine.deferred_frees:
            sharing = [request_id for request_id, table in tables.items() if block in table]
            # A block loses its hash while shared only when a failed load evicted it.
            if engine.settings.recompute_failed_loads:
                raise IntegrityError(name, f"shared by {sharing} without being cached")
        if block.block_hash is not None and block not in pool.cached.get(block.block_hash, ()):
            raise IntegrityError(name, "has a hash that the prefix cache does not know")
    if owners[0] or 0 in pool.free_queue:
        raise IntegrityError("block 0", "the null block was handed out")
    for request_id, table in tables.items():
        if len({block.block_id for block in table}) != len(table):
            raise IntegrityError(f"request {request_id}", f"holds a block twice: {[block.block_id for block in table]}")


def _check_queues(engine: Engine) -> None:
    places: Counter[str] = Counter(r.request_id for queue in (engine.running, engine.waiting, engine.kv_holding_waiting) for r in queue)
    for request_id, request in engine.requests.items():
        expected = 0 if request.is_finished() else 1
        if places[request_id] != expected:
            raise IntegrityError(f"request {request_id}", f"{request.status.name}, in {places[request_id]} queues instead of {expected}")
    for request_id in places.keys() - engine.requests.keys():
        raise IntegrityError(f"request {request_id}", "queued and does not exist")
    for request in engine.running:
        if request.status != RequestStatus.RUNNING:
            raise IntegrityError(f"request {request.request_id}", f"in the running list as {request.status.name}")


def _check_request(engine: Engine, request: Request) -> None:
    name = f"request {request.request_id}"
    table = engine.kv_cache_manager.tables.get(request.request_id, [])
    computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
    for what, value in (
        ("output placeholders", placeholders),
        ("tokens in flight", request.num_in_flight_tokens),
        ("stale tokens", request.num_stale_output_tokens),
    ):
        if value < 0:
            raise IntegrityError(name, f"{value} {what}")
    if computed < 0 and engine.connector is None:
        raise IntegrityError(name, f"{computed} computed tokens")  # a connector can cause it with a negative answer (R025)
    if not engine.settings.is_async and (placeholders or request.num_stale_output_tokens):
        raise IntegrityError(name, "placeholders or stale output though scheduling is synchronous")
    if request.status == RequestStatus.PREEMPTED and (table or computed) and not engine.connector:
        raise IntegrityError(name, f"preempted with {len(table)} blocks and {computed} computed tokens")
    if not request.is_finished() and computed > len(table) * engine.settings.block_size:
        raise IntegrityError(name, f"{computed} computed tokens in {len(table)} blocks of {engine.settings.block_size}")
    cached = engine.kv_cache_manager.num_cached.get(request.request_id, 0)
    if cached > len(table) or cached > len(request.block_hashes):
        raise IntegrityError(name, f"{cached} blocks published, {len(table)} held, {len(request.block_hashes)} hashes known")
