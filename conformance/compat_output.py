# SPDX-License-Identifier: Apache-2.0
"""What depends on the installed vLLM in what scheduler and worker hand each other: a step, and what came of it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.output import NewRequestData

from kvconform.compat import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput

try:
    from vllm.v1.core.sched.output import KVConnectorBlockState
except ImportError:  # until 0.26
    KVConnectorBlockState = None  # type: ignore[assignment,misc]

_STATE_FIELDS = inspect.signature(KVConnectorBlockState).parameters if KVConnectorBlockState is not None else {}


def runner_output(
    req_ids: Sequence[str] = (), tokens: Sequence[list[int]] = (), reports: KVConnectorOutput | None = None
) -> ModelRunnerOutput:
    """The output of a model runner: `tokens` sampled for each request, `reports` of the connector. Until 0.13 the rest had no defaults."""
    return ModelRunnerOutput(
        req_ids=list(req_ids),
        req_id_to_index={req: index for index, req in enumerate(req_ids)},
        sampled_token_ids=list(tokens),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=reports,
    )


def new_request_data(request: Any, block_ids: tuple[list[int], ...], prefill: list[int] | None) -> NewRequestData:
    """NewRequestData of a request; `prefill`: all its tokens, for model runner V2. 0.11 knew no such field."""
    if prefill is None:
        return NewRequestData.from_request(request, block_ids)
    return NewRequestData.from_request(request, block_ids, prefill)


def make_scheduler_output(**values: Any) -> SchedulerOutput:
    """SchedulerOutput. What the installed version wants besides is the empty value of its time; what it does not know yet is set too."""
    if "num_common_prefix_blocks" in SchedulerOutput.__dataclass_fields__:  # until 0.31, and unused since long before
        values.setdefault("num_common_prefix_blocks", [])
    known = SchedulerOutput.__dataclass_fields__
    made = SchedulerOutput(**{name: value for name, value in values.items() if name in known})
    for name in values.keys() - known:
        setattr(made, name, values[name])
    return made


def has_sync_loads(scheduler_output: SchedulerOutput) -> bool:
    """Whether loads must be there before this step's forward pass. Until 0.28 every load was started before it."""
    return "has_sync_kv_loads" not in SchedulerOutput.__dataclass_fields__ or scheduler_output.has_sync_kv_loads


def block_state(req_ids: set[str], get_block_ids: Any) -> Any:
    """What build_connector_meta may ask about blocks; None until 0.26, which had no such thing."""
    if KVConnectorBlockState is None:
        return None
    if "block_ids" in _STATE_FIELDS:  # until 0.30: made whether somebody asks or not
        return KVConnectorBlockState({req_id: get_block_ids(req_id) for req_id in req_ids}, {})
    return KVConnectorBlockState(req_ids, get_block_ids, boundary_state_offloads={})
