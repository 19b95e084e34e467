# SPDX-License-Identifier: Apache-2.0
"""State of the reference engine: the lives of its requests, their blocks, and its invariants.

A request is vLLM's own `Request`. It is added, preempted, finished, perhaps held for a transfer,
and forgotten. Its counters: num_computed_tokens counts every scheduled step, landed or not;
num_output_placeholders counts tokens sampled but not known yet, with asynchronous scheduling only;
num_tokens counts the known token ids.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kvconform.compat.vllm_api import AWAITING_INPUT
from kvconform.refimpl.errors import EngineAssertion, IntegrityError
from kvconform.refimpl.kv_manager import KVManager
from kvconform.refimpl.paging import NULL_BLOCK
from kvconform.refimpl.queues import WaitingQueue
from kvconform.refimpl.settings import Settings


def check_integrity(engine: Engine) -> None:
    """Raise IntegrityError for the first invariant that does not hold.

    The invariants hold between steps: every block in use has owners, requests hold blocks for
    their tokens, counters are consistent. A connector may hold blocks of its own (`touch`).
    """
    _check_blocks(engine)
    places = Counter(
        request.request_id
        for queue in (engine.running, engine.waiting, engine.kv_holding_waiting)
        for request in queue
    )
    mentioned = set(places).union(*(group.tables for group in engine.kv_cache_manager.groups))
    for request_id in mentioned - engine.requests.keys():
        raise IntegrityError(
            f"request {request_id}", "is queued or holds blocks and does not exist"
        )
    for request in engine.requests.values():
        wrong = _wrong_with(engine, request, places[request.request_id])
        if wrong is not None:
            raise IntegrityError(f"request {request.request_id}", wrong)


def _check_blocks(engine: Engine) -> None:
    pool = engine.kv_cache_manager.block_pool
    tables = [table for group in engine.kv_cache_manager.groups for table in group.tables.values()]
    tables += [blocks for _, blocks in engine.deferred_frees]
    owners = Counter(block.block_id for table in tables for block in table if not block.is_null)
    queue = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
    for block in pool.blocks[1:]:
        is_free = block.block_id in queue
        owned = owners.get(block.block_id, 0)
        if is_free != (block.ref_cnt == 0) or block.ref_cnt < owned:
            raise IntegrityError(
                f"block {block.block_id}",
                f"held {block.ref_cnt} times, in {owned} tables, "
                f"{'' if is_free else 'not '}in the free queue",
            )
        if block.block_hash is not None and not pool.is_cached(block):
            raise IntegrityError(
                f"block {block.block_id}", "has a hash that the prefix cache does not know"
            )
        # Requests share only cached blocks. A block in use leaves the prefix cache only when a
        # load fails without being recomputed.
        is_shared = owned > 1
        if is_shared and block.block_hash is None and engine.settings.recompute_failed_loads:
            raise IntegrityError(
                f"block {block.block_id}", f"shared by {owned} requests without being cached"
            )
    if 0 in queue:
        raise IntegrityError("block 0", "the null block was handed out")


def _wrong_with(engine: Engine, request: Request, places: int) -> str | None:
    """Return what is inconsistent about a request that is in so many queues, or None."""
    computed = request.num_computed_tokens
    placeholders = request.num_output_placeholders
    in_flight = request.num_in_flight_tokens
    stale = request.num_stale_output_tokens
    is_finished = request.is_finished()
    if places != (0 if is_finished else 1):
        return f"{request.status.name}, in {places} queues"
    if request.status != RequestStatus.RUNNING and request in engine.running:
        return f"in the running list as {request.status.name}"
    runs_on = not is_finished and request.status != RequestStatus.WAITING_FOR_REMOTE_KVS
    held: set[int] = set()
    for group in engine.kv_cache_manager.groups:
        table = group.ids(request.request_id)
        blocks = [block for block in table if block != NULL_BLOCK]
        cached = group.num_cached.get(request.request_id, 0)
        if len(set(blocks)) < len(blocks) or not held.isdisjoint(blocks):
            return f"holds a block twice: {table}"
        held.update(blocks)
        # What loads or has ended may lack a window; full attention never lacks a block.
        lacks = not group.holds_what_is_read(request.request_id, max(0, computed))
        if lacks and (runs_on or group.reach.window is None):
            return f"holds no block where its next token reads: {table}"
        if not is_finished and computed > len(table) * group.block_size:
            return f"{computed} computed tokens in {len(table)} blocks"
        if cached > min(len(table), len(request.block_hashes)):
            return f"{cached} blocks published of {len(table)}, {len(request.block_hashes)} hashes"
    if min(placeholders, in_flight, stale) < 0:
        return f"{placeholders} placeholders, {in_flight} tokens in flight, {stale} of them stale"
    if placeholders != 0 and not engine.settings.is_async:
        return f"{placeholders} placeholders though scheduling is synchronous"
    # A connector's negative lookup answer gets here (R025), so this holds only without one.
    if computed < 0 and engine.connector is None:
        return f"{computed} computed tokens"
    return None


class Engine:
    """Requests, queues and blocks of one engine, and what its owner does to them between steps.

    `connector` is the scheduler half, already constructed; it is bound here. `policies` are names
    from spec/situations.yaml. ValueError for a configuration that is not supported.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        connector: KVConnectorBase_V1 | None,
        *,
        block_size: int,
        async_scheduling: bool,
        runner: str = "v1",
        policies: frozenset[str] = frozenset(),
    ) -> None:
        self.settings = Settings(
            vllm_config, kv_cache_config, block_size, async_scheduling, runner, policies
        )
        self.connector = connector
        self.num_spec_tokens = self.settings.num_spec
        self.num_sampled_tokens_per_step = self.settings.sampled_per_step
        # Read once (R162). If true, tokens in flight at a preemption are dropped: their KV was to
        # be delivered, and the preemption frees it.
        self.requires_kv_delivery = (
            connector.requires_kv_delivery if connector is not None else False
        )
        self.kv_cache_manager = KVManager(self.settings)
        if connector is not None:
            connector.bind_kv_cache_manager(self.kv_cache_manager)

        # All requests, also finished ones whose blocks are still held for a transfer.
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue(self.settings.priority)
        # Requests that load or have loaded KV: served before `waiting`.
        self.kv_holding_waiting = WaitingQueue(self.settings.priority)
        self.running: list[Request] = []
        # 1: no new request starts, those that hold blocks continue. 2: nothing runs.
        self.pause_level = 0

        # Since the last step.
        self.finished_req_ids: set[str] = set()
        self.preempted_req_ids: set[str] = set()
        # Requests in the last step.
        self.scheduled_before: set[str] = set()
        # Requests whose asynchronous load was reported, and requests whose load has failed.
        self.finished_recving_kv_req_ids: set[str] = set()
        self.failed_recving_kv_req_ids: set[str] = set()
        # Requests that load, or whose prompt is not complete: their blocks are reserved.
        self.inflight_prefills: set[Request] = set()
        # Steps in flight: id(output) -> the output and the requests in it.
        self.in_flight: dict[int, tuple[SchedulerOutput, dict[str, Request]]] = {}

        # Deferred frees (R150): blocks wait until every step that may write them has landed. Both
        # counters count steps with tokens.
        self.scheduled_steps = 0
        self.landed_steps = 0
        self.deferred_frees: deque[tuple[int, list[KVCacheBlock]]] = deque()

        # vLLM's PrefixCacheStats, if the owner collects them.
        self.connector_prefix_cache_stats: Any = None
        # For the policy deny-first-alloc.
        self.denied_once: set[Request] = set()
        self.preempted_between_steps = False

    # -- questions

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that can still be scheduled, given the pause level."""
        waiting = len(self.kv_holding_waiting) + (len(self.waiting) if self.pause_level == 0 else 0)
        waiting -= self.get_num_awaiting_input()
        return waiting + len(self.running) if self.pause_level < 2 else 0

    def get_num_awaiting_input(self) -> int:
        """Return the number of sessions that wait for their next input."""
        queues = (self.kv_holding_waiting, self.waiting)
        return sum(each.status == AWAITING_INPUT for queue in queues for each in queue)

    def has_unfinished_requests(self) -> bool:
        """Return whether any request can still be scheduled."""
        return self.get_num_unfinished_requests() > 0

    def has_finished_requests(self) -> bool:
        """Return whether a finish is still to be announced, or blocks are held for a transfer."""
        alive = len(self.running) + len(self.waiting) + len(self.kv_holding_waiting)
        return bool(self.finished_req_ids) or (
            self.connector is not None and len(self.requests) > alive
        )

    def has_requests(self) -> bool:
        """Return whether the engine has to make further steps (R151, R224)."""
        busy = self.has_unfinished_requests() or self.has_finished_requests()
        return busy or (self.connector is not None and self.connector.has_pending_push_work())

    def check_integrity(self) -> None:
        """Raise IntegrityError for the first broken invariant. Call it between steps."""
        check_integrity(self)

    # -- requests

    def add_request(self, request: Request) -> None:
        """Queue a request. EngineAssertion if its id is in use."""
        if request.request_id in self.requests:
            raise EngineAssertion("R060", f"duplicate request id {request.request_id}")
        if request.structured_output_request is not None:
            raise ValueError(
                f"The reference engine has no structured output, and {request.request_id} wants it."
            )
        self.waiting.add_request(request)
        self.requests[request.request_id] = request
        if self.connector is not None:
            self.connector.on_new_request(request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """End requests from outside (abort, error), in the order given; None: all.

        Returns those that were not finished yet.
        """
        if isinstance(request_ids, str):
            ids = [request_ids]
        elif request_ids is None:
            ids = list(self.requests)
        else:
            ids = list(dict.fromkeys(request_ids))
        ending = [
            request
            for request in map(self.requests.get, ids)
            if request is not None and not request.is_finished()
        ]
        self.leave_queues(set(ending))
        for request in ending:
            request_id = request.request_id
            # A load in progress still writes into the blocks: its report frees them (R126).
            is_loading = (
                request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
                and request_id not in self.finished_recving_kv_req_ids
            )
            self.finished_recving_kv_req_ids.discard(request_id)
            self.failed_recving_kv_req_ids.discard(request_id)
            request.status = finished_status
            self.end(request, delay_free=is_loading)
        return ending

    def leave_queues(self, requests: set[Request]) -> None:
        """Remove requests from the queues that they are in."""
        if requests:
            self.running = [request for request in self.running if request not in requests]
            self.waiting.remove_requests(requests)
            self.kv_holding_waiting.remove_requests(requests)

    def end(self, request: Request, *, delay_free: bool = False) -> dict[str, Any] | None:
        """Report a finished request to the connector; return the connector's KV transfer params.

        The blocks are freed unless the connector keeps them, or `delay_free` is set.
        """
        delay, params = False, None
        self.inflight_prefills.discard(request)
        self.denied_once.discard(request)
        if self.connector is not None:
            passed = request.num_computed_tokens
            if delay_free:
                # A load of the whole prompt, still under way, fills what its last token reads.
                passed = min(passed, request.num_tokens - 1)
            self.kv_cache_manager.free_passed(request, passed)
            covering = -(-request.num_computed_tokens // self.settings.block_size)
            tables = self.kv_cache_manager.get_block_ids(request.request_id)
            tables = tuple([table[:covering] for table in tables])
            if isinstance(self.connector, SupportsHMA):
                delay, params = self.connector.request_finished_all_groups(request, tables)
            else:
                delay, params = self.connector.request_finished(request, tables[0])
        self.finished_req_ids.add(request.request_id)
        if not (delay or delay_free):
            self.forget(request)
        return params

    def forget(self, request: Request) -> None:
        """Free a finished request's blocks and drop it. EngineAssertion if it is not finished."""
        if not request.is_finished():
            raise EngineAssertion(
                "R146",
                f"{request.request_id} is {request.status.name}, not finished: "
                "its blocks cannot be freed",
            )
        self.free_blocks(request)
        del self.requests[request.request_id]

    def frees_at_once(self, request: Request) -> bool:
        """Return whether the request's blocks need not wait for a step in flight (R150)."""
        return not self.settings.defer_frees or request.last_sched_seq <= self.landed_steps

    def free_blocks(self, request: Request) -> None:
        """Free the request's blocks, now or when the last scheduled step has landed."""
        if self.frees_at_once(request):
            self.kv_cache_manager.free(request)
        elif blocks := self.kv_cache_manager.pop_blocks_for_free(request):
            self.deferred_frees.append((self.scheduled_steps, blocks))

    # -- preemption and reset

    def preempt_now(self, request: Request, *, drop_stale: bool) -> None:
        """Free the blocks of a request that has left `running`, and queue it in front.

        It will compute all its tokens again. `drop_stale`: the tokens in flight are dropped.
        """
        self.free_blocks(request)
        self.inflight_prefills.discard(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.spec_token_ids = []
        # Tokens in flight are stale (R161): they are delivered without moving the counters, or
        # dropped. Those that were to be dropped stay so: their positions were sampled again.
        request.drop_stale_output = drop_stale or (
            request.drop_stale_output and request.num_stale_output_tokens > 0
        )
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_preemptions += 1
        self.waiting.prepend_requests([request])
        self.preempted_req_ids.add(request.request_id)

    def preempt(self, request_id: str) -> bool:
        """Preempt a running request as if memory had run out.

        No waiting request is admitted in the next step. False, and nothing changed, if the request
        is not running or its blocks could not be freed at once (R160): land a step and try again.
        """
        request = self.requests.get(request_id)
        if request is None or request not in self.running or not self.frees_at_once(request):
            return False
        self.running.remove(request)
        self.preempt_now(request, drop_stale=self.requires_kv_delivery)
        self.preempted_between_steps = True
        return True

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the local prefix cache and, if asked, the connector's cache.

        False if blocks are in use or the connector failed. With `reset_running_requests`, all
        running requests are preempted first; they may resume in the next step (R153). RuntimeError
        if blocks are held even so (R172): by a load, a transfer after a finish, or a step in
        flight.
        """
        if reset_running_requests:
            while self.running:
                self.preempt_now(self.running.pop(), drop_stale=True)
            self.scheduled_before = set()
        done = self.kv_cache_manager.block_pool.reset_prefix_cache()
        if reset_running_requests and not done:
            raise RuntimeError(
                "The KV cache was not reset: blocks are still held "
                "though all running requests were preempted (R172)."
            )
        if reset_connector and self.connector is not None:
            done = self.connector.reset_cache() is not False and done
        return done

    def set_pause_state(self, pause_state: int) -> None:
        """Set `pause_level`: 0, 1 or 2."""
        self.pause_level = int(pause_state)

    def shutdown(self) -> None:
        """Shut down the connector's scheduler half."""
        if self.connector is not None:
            self.connector.shutdown()
