# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine's scheduler: hooks that it does not call, calls twice, or calls with other arguments."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request, RequestStatus

from kvconform.refimpl import admission, output, scheduler, transfers
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.faulty import connector_of, fault
from kvconform.refimpl.plan import ReferenceMetadata
from kvconform.refimpl.scheduler import ReferenceScheduler

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


@fault(scheduler, "admit_waiting")
def allocates_in_silence(admit: Any, engine: Engine, step: Any) -> None:
    """Calls update_state_after_alloc only for requests that load something."""

    def granted(original: Any, request: Request, blocks: Any, external: int) -> None:
        if external:
            original(request, blocks, external)

    with connector_of(engine, update_state_after_alloc=granted):
        admit(engine, step)


@fault(scheduler, "admit_waiting")
def grants_too_much(admit: Any, engine: Engine, step: Any) -> None:
    """Grants a block more than the connector claimed: it counts the partly filled block as whole."""

    def more(original: Any, request: Request, blocks: Any, external: int) -> None:
        original(
            request, blocks, external + engine.settings.block_size if external > 0 else external
        )

    with connector_of(engine, update_state_after_alloc=more):
        admit(engine, step)


@fault(scheduler, "admit_waiting")
def grants_again_after_the_load(admit: Any, engine: Engine, step: Any) -> None:
    """Grants a token again when the asynchronous load is over (B015: a second load is triggered)."""
    grants: dict[str, int] = engine.__dict__.setdefault("_grants", {})

    def again(original: Any, request: Request, blocks: Any, external: int) -> None:
        original(request, blocks, external or min(1, grants.pop(request.request_id, 0)))
        if external:
            grants[request.request_id] = external

    with connector_of(engine, update_state_after_alloc=again):
        admit(engine, step)


@fault(admission, "_is_ready")
def does_not_wait_for_the_load(is_ready: Any, engine: Engine, request: Request) -> bool:
    """Schedules a request in the step after its asynchronous load was started."""
    if request.status == LOADING and request.request_id not in engine.finished_recving_kv_req_ids:
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return True
    return bool(is_ready(engine, request))


@fault(transfers, "finished")
def ignores_late_reports(finished: Any, engine: Engine, connector: Any, reported: Any) -> None:
    """Ignores the report of a load whose request was aborted: its blocks are never freed (the other side of B045)."""
    gone = {
        i
        for i in reported.finished_recving or ()
        if i in engine.requests and engine.requests[i].is_finished()
    }
    if gone:
        reported.finished_recving = set(reported.finished_recving) - gone
    finished(engine, connector, reported)


@fault(admission, "_admit")
def looks_up_after_the_load(admit: Any, engine: Engine, step: Any, request: Request) -> Any:
    """Looks a request up again when its asynchronous load is over (B015)."""
    if request.num_computed_tokens and engine.connector is not None:
        block_size = engine.settings.block_size
        engine.connector.get_num_new_matched_tokens(
            request, request.num_computed_tokens // block_size * block_size
        )
    return admit(engine, step, request)


@fault(admission, "_look_up")
def looks_up_within_a_block(look_up: Any, engine: Engine, request: Request) -> Any:
    """Passes a local hit that ends within a block, and goes on from another one (B019)."""

    def within(original: Any, asked: Request, local: int) -> Any:
        return original(asked, local + 1 if local else 0)

    with connector_of(engine, get_num_new_matched_tokens=within):
        return look_up(engine, request)


@fault(Engine, "end")
def finishes_twice(end: Any, engine: Engine, request: Request, **kwargs: Any) -> Any:
    """Calls request_finished once more for a request that is aborted."""

    def twice(original: Any, asked: Request, blocks: list[int]) -> Any:
        if asked.status == RequestStatus.FINISHED_ABORTED:
            original(asked, blocks)
        return original(asked, blocks)

    with connector_of(engine, request_finished=twice):
        return end(engine, request, **kwargs)


@fault(Engine, "end")
def aborts_waiting_in_silence(end: Any, engine: Engine, request: Request, **kwargs: Any) -> Any:
    """Calls request_finished only for requests that have blocks (B058: a lookup's pin is never released)."""
    has_blocks = bool(engine.kv_cache_manager.get_block_ids(request.request_id)[0])
    with connector_of(
        engine,
        **({} if has_blocks else {"request_finished": lambda original, *args: (False, None)}),
    ):
        return end(engine, request, **kwargs)


@fault(Engine, "end")
def finishes_with_all_blocks(end: Any, engine: Engine, request: Request, **kwargs: Any) -> Any:
    """Passes lookahead blocks to request_finished, which hold nothing (B026)."""
    table = list(engine.kv_cache_manager.get_block_ids(request.request_id)[0])
    with connector_of(
        engine, request_finished=lambda original, asked, blocks: original(asked, table)
    ):
        return end(engine, request, **kwargs)


@fault(Engine, "end")
def finish_unannounced(end: Any, engine: Engine, request: Request, **kwargs: Any) -> Any:
    """Does not name aborted requests in finished_req_ids."""
    params = end(engine, request, **kwargs)
    if request.status == RequestStatus.FINISHED_ABORTED:
        engine.finished_req_ids.discard(request.request_id)
    return params


@fault(ReferenceScheduler, "schedule")
def builds_metadata_twice(schedule: Any, engine: ReferenceScheduler) -> Any:
    """Builds a step's metadata twice and keeps the second, which is empty: the first took what was queued."""

    def twice(original: Any, step: Any) -> Any:
        original(step)
        return original(step)

    with connector_of(engine, build_connector_meta=twice):
        return schedule(engine)


@fault(ReferenceScheduler, "schedule")
def builds_no_metadata_without_tokens(schedule: Any, engine: ReferenceScheduler) -> Any:
    """Builds no metadata in a step without tokens: what is queued for it is not planned (B054)."""

    def if_any(original: Any, step: Any) -> Any:
        return original(step) if step.total_num_scheduled_tokens else ReferenceMetadata(0)

    with connector_of(engine, build_connector_meta=if_any):
        return schedule(engine)


@fault(admission, "_look_up")
def resumes_without_lookup(look_up: Any, engine: Engine, request: Request) -> Any:
    """Does not look a preempted request up again."""
    if not request.num_preemptions:
        return look_up(engine, request)
    with connector_of(engine, get_num_new_matched_tokens=lambda original, *args: (0, False)):
        return look_up(engine, request)


@fault(scheduler, "land")
def knows_every_request(land: Any, engine: Engine, step: Any, result: Any) -> Any:
    """Takes for granted that a request of a step in flight is still there when the step lands."""
    for request_id in step.num_scheduled_tokens:
        engine.requests[request_id]
    return land(engine, step, result)


@fault(Engine, "end")
def _forgets_at_once(
    end: Any, engine: Engine, request: Request, *, delay_free: bool = False
) -> Any:
    """Frees the blocks of a request that is aborted while its load is written into them (B045)."""
    return end(engine, request)


@_forgets_at_once.and_(transfers, "finished")
def frees_under_a_load(finished: Any, engine: Engine, connector: Any, reported: Any) -> None:
    reported.finished_recving = {i for i in reported.finished_recving or () if i in engine.requests}
    finished(engine, connector, reported)


@fault(Engine, "reset_prefix_cache")
def resets_itself_only(
    reset: Any,
    engine: Engine,
    *,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> Any:
    """Resets its own prefix cache and forgets the connector's: KV of the old weights is served on (B086)."""
    return reset(engine, reset_running_requests, False)


@fault(Engine, "reset_prefix_cache")
def raises_after_preempting(
    reset: Any,
    engine: Engine,
    *,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> Any:
    """Preempts what runs for a reset, and then raises, so that nobody's cache is reset (R172)."""
    done = reset(engine, reset_running_requests, reset_connector and not reset_running_requests)
    if reset_running_requests:
        raise RuntimeError("Blocks are still held.")
    return done


@fault(output, "_append")
def publishes_placeholders(
    append: Any, engine: Engine, request: Request, sampled: list[int], is_stale: bool
) -> Any:
    """Publishes blocks up to the computed count, placeholders included."""
    found = append(engine, request, sampled, is_stale)
    if engine.settings.is_async:
        known = len(request.block_hashes) * engine.settings.block_size
        engine.kv_cache_manager.cache_blocks(request, min(known, request.num_computed_tokens))
    return found
