# SPDX-License-Identifier: Apache-2.0
"""What depends on the installed vLLM in the worker: the order and the arguments of a step's hooks in both model runners."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from vllm.forward_context import ForwardContext, set_forward_context
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvconform.compat import (
    PREEMPTIONS_BY_METADATA,
    UNRECORDED,
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    VllmConfig,
    torch,
)
from kvconform.compat_output import runner_output

try:
    from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
except ImportError:  # until 0.15
    from vllm.attention.utils.kv_transfer_utils import maybe_transfer_kv_layer  # type: ignore[no-redef]
try:
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
except ImportError:  # until 0.15 model runner V2 knew no connectors
    ActiveKVConnector = None  # type: ignore[assignment,misc]

__all__ = ["ActiveKVConnector", "maybe_transfer_kv_layer"]

CAN_DEFER = "defer_finalize" in inspect.signature(KVConnectorModelRunnerMixin.maybe_get_kv_connector_output).parameters


@lru_cache(maxsize=64)
def _parameters(function: Any) -> frozenset[str]:
    """The names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def forward_context(metadata: Any, config: VllmConfig, **arguments: Any) -> Any:
    """set_forward_context with those arguments that it takes (`slot_mapping`: since 0.16)."""
    known = _parameters(set_forward_context)
    return set_forward_context(metadata, config, **{name: value for name, value in arguments.items() if name in known})


def layer_cache(tensor: torch.Tensor) -> Any:
    """A layer's `kv_cache`: until 0.18 a list with one tensor per virtual engine."""
    return [tensor] if "virtual_engine" in ForwardContext.__dataclass_fields__ else tensor


def handle_preemptions(connector: Any, output: SchedulerOutput) -> None:
    """Call the hook as model runner V1 of the installed release does."""
    if PREEMPTIONS_BY_METADATA:
        connector.handle_preemptions(output.kv_connector_metadata)
    elif output.preempted_req_ids and "handle_preemptions" not in UNRECORDED:
        connector.handle_preemptions(output.preempted_req_ids)


def collecting(output: SchedulerOutput, *, defer: bool) -> Any:
    """The context in which model runner V1 computes; `defer`: the save is finished by finish_deferred (since 0.18)."""
    mixin = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output
    return mixin(output, defer_finalize=defer) if CAN_DEFER else mixin(output)


def finish_deferred() -> None:
    """What `collecting(defer=True)` left to do after the drafter."""
    if CAN_DEFER:
        KVConnectorModelRunnerMixin.finalize_kv_connector()


def output_without_forward(collected: KVConnectorOutput) -> ModelRunnerOutput:
    """The result of a step without a forward pass; what is empty is left out (R201)."""
    if hasattr(ModelRunnerOutput, "with_kv_conn_output_only"):  # since 0.22
        return ModelRunnerOutput.with_kv_conn_output_only(collected)
    return runner_output(reports=None if collected.is_empty() else collected)


def finish_forward(active: Any) -> None:
    """ActiveKVConnector.finish_forward, which releases until 0.30 do not have."""
    if hasattr(active, "finish_forward"):
        active.finish_forward()


def post_forward(active: Any, output: SchedulerOutput, *, defer: bool = False) -> KVConnectorOutput | None:
    """ActiveKVConnector.post_forward: until 0.22 of the output, then of its finished request ids. `defer`: the save is finished by
    finish_step (since 0.33)."""
    known = _parameters(type(active).post_forward)
    subject = output if "scheduler_output" in known else output.finished_req_ids
    found = active.post_forward(subject, defer_finalize=defer) if "defer_finalize" in known else active.post_forward(subject)
    return found  # type: ignore[no-any-return]


def finish_step(active: Any) -> None:
    """What `post_forward(defer=True)` left to do after the drafter."""
    if hasattr(active, "finalize_step"):
        active.finalize_step()


def pre_forward(active: Any, output: SchedulerOutput, batch: Any, metadata: Any, load_arguments: dict[str, Any]) -> None:
    """ActiveKVConnector.pre_forward: until 0.30 of the output, in 0.31 with start_load_kv's arguments, then with what those are made of."""
    parameters = _parameters(type(active).pre_forward)
    if "input_batch" in parameters:
        active.pre_forward(output, batch, metadata)
    elif len(parameters) > 2:  # and itself
        active.pre_forward(**{**load_arguments, "scheduler_output": output})
    else:
        active.pre_forward(output)
