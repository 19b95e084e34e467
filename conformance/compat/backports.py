# SPDX-License-Identifier: Apache-2.0
"""The newest connector interface on older vLLM releases: adds the hooks and fields that they lack.

An added hook does what an engine without it did: nothing, and the probe does not record it. One
hook is recorded, `get_transfer_results`: until 0.30 `get_finished` returned the results of a step's
transfers, as two sets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

RECORDED = "get_transfer_results"
"""The one added hook that the probe records."""


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing: an engine of this release does not call the hook."""


def _no(self: Any, *args: Any, **kwargs: Any) -> bool:
    return False


def _bind(self: Any, kv_cache_manager: Any) -> None:
    bind_pool = getattr(self, "bind_gpu_block_pool", None)
    if bind_pool is not None:
        bind_pool(kv_cache_manager.block_pool)


def _handshake(self: Any, metadata: dict[tuple[int, int], Any]) -> None:
    """Hand over the handshake metadata as releases until 0.22 did.

    It was keyed by tensor parallel rank alone, and only handed over if there was any.
    """
    if metadata and hasattr(self, "set_xfer_handshake_metadata"):
        self.set_xfer_handshake_metadata(
            {tensor_rank: value for (_, tensor_rank), value in metadata.items()}
        )


def _results(self: Any, finished_req_ids: set[str]) -> SimpleNamespace:
    sending, recving = self.get_finished(finished_req_ids)
    return SimpleNamespace(
        finished_sending=sending or set(), finished_recving=recving or set(), failed_recving=set()
    )


HOOKS: dict[str, Callable[..., Any]] = {
    "bind_kv_cache_manager": _bind,
    "build_connector_worker_meta": _nothing,
    "finish_forward": _nothing,
    "get_block_ids_with_load_errors": lambda self: set(),
    "get_finished_count": _nothing,
    "get_handshake_metadata": _nothing,
    "get_kv_connector_kv_cache_events": _nothing,
    "get_kv_connector_stats": _nothing,
    "get_loaded_kv_cache_group_ids": _nothing,
    "get_transfer_results": _results,
    "handle_preemptions": _nothing,
    "has_pending_block_frees": _no,
    "has_pending_push_work": _no,
    "on_new_request": _nothing,
    "reset_cache": _nothing,
    "set_xfer_handshake_metadata_pp_aware": _handshake,
    "take_events": lambda self: (),
}


def complete(base: type) -> frozenset[str]:
    """Add the hooks that `base` (KVConnectorBase_V1) lacks; return those that are not recorded."""
    added = [name for name in HOOKS if not hasattr(base, name)]
    for name in added:
        setattr(base, name, HOOKS[name])
    # Since 0.29; before, output that was in flight at a preemption was delivered.
    if not hasattr(base, "requires_kv_delivery"):
        base.requires_kv_delivery = property(_no)  # type: ignore[attr-defined]
    return frozenset(added) - {RECORDED}


def complete_outputs(report: type, step: type) -> frozenset[str]:
    """Add the fields that KVConnectorOutput and SchedulerOutput lack, empty; return their names."""
    added = set()
    for cls, name, value in (
        (report, "failed_recving", frozenset()),  # since 0.31
        (step, "preempted_req_ids", None),  # since 0.12
    ):
        if name not in cls.__dataclass_fields__:  # type: ignore[attr-defined]
            setattr(cls, name, value)
            added.add(name)
    return frozenset(added)


def wants_arrays(output: type) -> bool:
    """Return whether ModelRunnerOutput holds a request's tokens as an array.

    Only 0.11.2 does; releases before and after have lists.
    """
    return "ndarray" in str(output.__dataclass_fields__["sampled_token_ids"].type)  # type: ignore[attr-defined]


def give_arrays(scheduler: Any) -> None:
    """Let a scheduler of 0.11.2 take a step's tokens as lists, like all others.

    Changes the instance.
    """
    update = scheduler.update_from_output

    def updated(output: Any, result: Any) -> Any:
        own = copy.copy(result)
        own.sampled_token_ids = [
            np.array(tokens, dtype=np.int64) for tokens in result.sampled_token_ids
        ]
        return update(output, own)

    scheduler.update_from_output = updated


def inspect_models_here() -> None:
    """Let vLLM inspect a model's class in this process, not in another one.

    0.17 looks up a name that PyTorch has moved; `vllm_api` restores it in this process only.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def drop_output(request: Any, most: int) -> bool:
    """Drop a request's output in flight, as a reset that preempts a request does until 0.26.

    The request may be resumed before that output lands; the output would then be delivered in
    addition to the tokens that are sampled again. `most`: placeholders of one step. Changes the
    request. Returns False if the release cannot do it: 0.11, and until 0.21 with more than one step
    in flight.
    """
    placeholders = request.num_output_placeholders
    if not placeholders:
        return True
    if hasattr(request, "async_tokens_to_discard"):  # since 0.22
        request.async_tokens_to_discard = placeholders
    elif hasattr(request, "discard_latest_async_tokens") and placeholders <= most:  # since 0.12
        request.discard_latest_async_tokens = True
    else:
        return False
    request.num_output_placeholders = 0
    return True


def preempt(scheduler: Any, request: Any) -> None:
    """Preempt a request that was taken out of `running`, as schedule() of 0.11 does inline.

    Later releases have a method for it.
    """
    scheduler.kv_cache_manager.free(request)
    scheduler.encoder_cache_manager.free(request)
    request.status = type(request.status).PREEMPTED
    request.num_computed_tokens = 0
    request.num_preemptions += 1
    scheduler.waiting.prepend_request(request)


def mark_chunks(scheduler: Any) -> None:
    """Let a scheduler mark the requests whose prefill continues, as releases since 0.16 do.

    Changes the instance.
    """
    update = scheduler._update_after_schedule

    def marked(output: Any) -> None:
        for req_id, count in output.num_scheduled_tokens.items():
            request = scheduler.requests[req_id]
            request.is_prefill_chunk = (
                request.num_computed_tokens + count
                < request.num_tokens + request.num_output_placeholders
            )
        update(output)

    scheduler._update_after_schedule = marked


def holds_finished(scheduler: Any) -> bool:
    """Return whether finished requests wait for the connector.

    Until 0.22 `has_requests` did not count them, so the engine stepped on only with other traffic.
    """
    queues = ("waiting", "skipped_waiting", "running", "kv_holding_waiting")
    return len(scheduler.requests) > sum(len(getattr(scheduler, queue, ())) for queue in queues)
