# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine's scheduler: hooks skipped, called twice, or called with other arguments."""

from __future__ import annotations

import copy
from typing import Any

from vllm.v1.request import Request, RequestStatus

from kvconform.refimpl.defects import targets
from kvconform.refimpl.engine import Engine
from kvconform.refimpl.faulty import (
    Altered,
    connector_of,
    returns,
    skipped,
    twice,
    with_arguments,
    with_keywords,
)
from kvconform.refimpl.plan import ReferenceMetadata

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


def _if_something_is_loaded(original: Any, request: Request, blocks: Any, external: int) -> None:
    if external:
        original(request, blocks, external)


allocates_in_silence = targets.ADMIT_WAITING.during(
    update_state_after_alloc=_if_something_is_loaded
)
"""Call update_state_after_alloc only for requests that load something."""


@targets.ADMIT_WAITING.replaced_by
def grants_too_much(admit: Any, engine: Engine, step: Any) -> None:
    """Grant a block more than was claimed: count a partly filled block as a whole one."""

    def more(request: Request, blocks: Any, external: int) -> tuple[Any, ...]:
        granted = external + engine.settings.block_size if external > 0 else external
        return request, blocks, granted

    with connector_of(engine, update_state_after_alloc=with_arguments(more)):
        admit(engine, step)


@targets.ADMIT_WAITING.replaced_by
def grants_again_after_the_load(admit: Any, engine: Engine, step: Any) -> None:
    """Grant a token again when the asynchronous load is over, which starts another load (B015)."""
    grants: dict[str, int] = engine.__dict__.setdefault("_grants", {})

    def again(original: Any, request: Request, blocks: Any, external: int) -> None:
        original(request, blocks, external or min(1, grants.pop(request.request_id, 0)))
        if external:
            grants[request.request_id] = external

    with connector_of(engine, update_state_after_alloc=again):
        admit(engine, step)


@targets.IS_READY.replaced_by
def does_not_wait_for_the_load(is_ready: Any, engine: Engine, request: Request) -> bool:
    """Schedule a request in the step after the start of its asynchronous load."""
    if request.status == LOADING and request.request_id not in engine.finished_recving_kv_req_ids:
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return True
    return bool(is_ready(engine, request))


looks_up_within_a_block = targets.LOOK_UP.during(
    get_num_new_matched_tokens=with_arguments(
        lambda request, local: (request, local + 1 if local else 0)
    ),
)
"""Pass a local hit that ends within a block, and go on from another one (B019)."""

resumes_without_lookup = targets.LOOK_UP.during(
    when=lambda engine, request: request.num_preemptions,
    get_num_new_matched_tokens=returns((0, False)),
)
"""Do not look up a preempted request again."""


@targets.ADMIT.before
def looks_up_after_the_load(engine: Engine, step: Any, request: Request) -> None:
    """Look up a request again when its asynchronous load is over (B015)."""
    if request.num_computed_tokens and engine.connector is not None:
        block_size = engine.settings.block_size
        local = request.num_computed_tokens // block_size * block_size
        engine.connector.get_num_new_matched_tokens(request, local)


def _twice_if_aborted(original: Any, request: Request, blocks: list[int]) -> Any:
    if request.status == RequestStatus.FINISHED_ABORTED:
        original(request, blocks)
    return original(request, blocks)


def _has_no_blocks(engine: Engine, request: Request, **kwargs: Any) -> bool:
    return not engine.kv_cache_manager.get_block_ids(request.request_id)[0]


finishes_twice = targets.END.during(request_finished=_twice_if_aborted)
"""Call request_finished once more for a request that is aborted."""


@targets.FINISH_REQUESTS.before
def finishes_the_finished(engine: Engine, request_ids: Any, status: RequestStatus) -> None:
    """Finish a request again that is aborted while its blocks are kept for a send (B136)."""
    ids = [request_ids] if isinstance(request_ids, str) else list(request_ids or ())
    for request in [engine.requests[i] for i in ids if i in engine.requests]:
        if request.is_finished():
            engine.end(request)


aborts_waiting_in_silence = targets.END.during(
    when=_has_no_blocks, request_finished=returns((False, None))
)
"""Call request_finished only for requests that have blocks: a lookup's pin stays (B058)."""


@targets.END.replaced_by
def finishes_with_all_blocks(end: Any, engine: Engine, request: Request, **kwargs: Any) -> Any:
    """Pass lookahead blocks to request_finished, which hold nothing (B026)."""
    table = list(engine.kv_cache_manager.get_block_ids(request.request_id)[0])
    all_blocks = with_arguments(lambda asked, blocks: (asked, table))
    with connector_of(engine, request_finished=all_blocks):
        return end(engine, request, **kwargs)


@targets.END.after
def finish_unannounced(_: Any, engine: Engine, request: Request, **kwargs: Any) -> None:
    """Do not name aborted requests in finished_req_ids."""
    if request.status == RequestStatus.FINISHED_ABORTED:
        engine.finished_req_ids.discard(request.request_id)


def _empty_without_tokens(original: Any, step: Any) -> Any:
    return original(step) if step.total_num_scheduled_tokens else ReferenceMetadata(0)


builds_metadata_twice = targets.SCHEDULE.during(build_connector_meta=twice)
"""Build the metadata twice and send the second, which is empty: the first took what was queued."""

builds_no_metadata_without_tokens = targets.SCHEDULE.during(
    build_connector_meta=_empty_without_tokens
)
"""Build no metadata in a step without tokens: what is queued for it is not planned (B054)."""


@targets.LAND.before
def knows_every_request(engine: Engine, step: Any, result: Any) -> None:
    """Assume that a request of a step in flight still exists when the step lands."""
    for request_id in step.num_scheduled_tokens:
        engine.requests[request_id]


def _ignoring(finished: Any, engine: Engine, connector: Any, reported: Any, ids: set[str]) -> None:
    """Pass the report to the connector, and act on it as if loads of `ids` were not in it."""
    connector.update_connector_output(reported)
    left = copy.copy(reported)
    left.finished_recving = set(reported.finished_recving or ()) - ids
    finished(engine, Altered(connector, update_connector_output=skipped), left)


@targets.FINISHED.replaced_by
def ignores_late_reports(finished: Any, engine: Engine, connector: Any, reported: Any) -> None:
    """Ignore the load report of an aborted request: its blocks are never freed.

    This is the opposite of B045.
    """
    requests = engine.requests
    received = reported.finished_recving or ()
    gone = {i for i in received if i in requests and requests[i].is_finished()}
    _ignoring(finished, engine, connector, reported, gone)


@targets.FINISHED.replaced_by
def _ignores_unknown_requests(finished: Any, engine: Engine, connector: Any, reported: Any) -> None:
    unknown = {i for i in reported.finished_recving or () if i not in engine.requests}
    _ignoring(finished, engine, connector, reported, unknown)


frees_under_a_load = (
    targets.END.replaced_by(with_keywords(delay_free=False)) + _ignores_unknown_requests
)
"""Free the blocks of an aborted request while its load is written into them (B045)."""


@targets.APPEND.after
def publishes_placeholders(
    _: Any, engine: Engine, request: Request, sampled: list[int], is_stale: bool
) -> None:
    """Publish blocks up to the computed count, placeholders included."""
    if engine.settings.is_async:
        known = len(request.block_hashes) * engine.settings.block_size
        engine.kv_cache_manager.cache_blocks(request, min(known, request.num_computed_tokens))


_lost: dict[str, list[Any]] = {}
"""The blocks that a request had when it was preempted last, by request id."""


@targets.PREEMPT_NOW.before
def _remembers_blocks(engine: Engine, request: Request, *args: Any, **kwargs: Any) -> None:
    _lost[request.request_id] = list(engine.kv_cache_manager.groups[0].tables[request.request_id])


@targets.APPEND.after
def _publishes_lost_blocks(
    _: Any, engine: Engine, request: Request, sampled: list[int], is_stale: bool
) -> None:
    manager = engine.kv_cache_manager
    if request.status == RequestStatus.PREEMPTED:
        blocks = _lost[request.request_id]
        hashed = [block.block_hash is not None for block in blocks]
        (group,) = manager.groups
        group.tables[request.request_id] = blocks
        group.num_cached[request.request_id] = [*hashed, False].index(False)
        known = min(request.num_tokens - 1, len(blocks) * engine.settings.block_size)
        manager.cache_blocks(request, known)
        manager.pop_blocks_for_free(request)


publishes_preempted = _remembers_blocks + _publishes_lost_blocks
"""Publish blocks of a preempted request when its last step lands: it has no blocks by then."""

resets_itself_only = targets.RESET_PREFIX_CACHE.replaced_by(with_keywords(reset_connector=False))
"""Reset the prefix cache, not the connector's cache: KV of the old weights is served (B086)."""


@targets.RESET_PREFIX_CACHE.replaced_by
def raises_after_preempting(
    reset: Any,
    engine: Engine,
    *,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> Any:
    """Preempt all requests for a reset and then raise, so that no cache is reset (R172)."""
    done = reset(engine, reset_running_requests, reset_connector and not reset_running_requests)
    if reset_running_requests:
        raise RuntimeError("Blocks are still held.")
    return done
