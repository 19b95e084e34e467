# SPDX-License-Identifier: Apache-2.0
"""One engine step in the installed vLLM: requests, scheduler output, worker hooks, runner output.

The worker's part is the order and the arguments of a step's hooks in both model runners.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

from vllm.forward_context import ForwardContext, set_forward_context
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvconform.compat.vllm_api import (
    PREEMPTIONS_BY_METADATA,
    UNRECORDED,
    KVConnectorOutput,
    ModelRunnerOutput,
    Request,
    SchedulerOutput,
    VllmConfig,
    torch,
)
from kvconform.kernels.codes import mix64
from kvconform.kv.provenance import Adapter, text_id

try:
    from vllm.v1.core.sched.output import KVConnectorBlockState
except ImportError:  # until 0.26
    KVConnectorBlockState = None  # type: ignore[assignment,misc]
try:
    from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
except ImportError:  # until 0.15
    from vllm.attention.utils.kv_transfer_utils import maybe_transfer_kv_layer  # type: ignore[no-redef]
try:
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
except ImportError:  # until 0.15 model runner V2 did not support connectors
    ActiveKVConnector = None  # type: ignore[assignment,misc]

__all__ = ["ActiveKVConnector", "maybe_transfer_kv_layer"]

_STATE_FIELDS = (
    inspect.signature(KVConnectorBlockState).parameters if KVConnectorBlockState is not None else {}
)
CAN_DEFER = (
    "defer_finalize"
    in inspect.signature(KVConnectorModelRunnerMixin.maybe_get_kv_connector_output).parameters
)
"""Whether model runner V1 can finish the save after the drafter (since 0.18)."""

# -- scheduler output and runner output


def runner_output(
    req_ids: Sequence[str] = (),
    tokens: Sequence[list[int]] = (),
    reports: KVConnectorOutput | None = None,
    vectors: Sequence[torch.Tensor | None] = (),
) -> ModelRunnerOutput:
    """Return a model runner's output: sampled `tokens` per request, the connector's `reports`.

    `vectors`: those of a pooling model per request, in place of tokens. All fields are given,
    because until 0.13 some had no defaults.
    """
    return ModelRunnerOutput(
        req_ids=list(req_ids),
        req_id_to_index={req: index for index, req in enumerate(req_ids)},
        sampled_token_ids=list(tokens),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=list(vectors),
        kv_connector_output=reports,
    )


def new_request_data(
    request: Any, block_ids: tuple[list[int], ...], prefill: list[int] | None
) -> NewRequestData:
    """Return a request's NewRequestData; `prefill`: all its tokens, for model runner V2.

    0.11 has no field for `prefill`.
    """
    if prefill is None:
        return NewRequestData.from_request(request, block_ids)
    return NewRequestData.from_request(request, block_ids, prefill)


def make_scheduler_output(**values: Any) -> SchedulerOutput:
    """Return a SchedulerOutput with these values.

    A field that only older releases require is empty. Values that the installed release has no
    field for are set as attributes.
    """
    known = SchedulerOutput.__dataclass_fields__
    if "num_common_prefix_blocks" in known:  # until 0.31, and unused since long before
        values.setdefault("num_common_prefix_blocks", [])
    made = SchedulerOutput(**{name: value for name, value in values.items() if name in known})
    for name in values.keys() - known:
        setattr(made, name, values[name])
    return made


def has_sync_loads(scheduler_output: SchedulerOutput) -> bool:
    """Return whether loads must complete before this step's forward pass.

    Until 0.28 every load was started before it.
    """
    return (
        "has_sync_kv_loads" not in SchedulerOutput.__dataclass_fields__
        or scheduler_output.has_sync_kv_loads
    )


def blocks_to_zero(scheduler_output: SchedulerOutput) -> list[int]:
    """Return the blocks that are zeroed before this step; none in releases that do not zero."""
    return list(getattr(scheduler_output, "new_block_ids_to_zero", None) or ())


ENDS = {"send": "finished_sending", "recv": "finished_recving"}
"""The field of a KVConnectorOutput that names ended transfers, by direction."""


def ended_transfers(reports: KVConnectorOutput | None) -> set[tuple[str, str]]:
    """Return the (direction, request id) of each transfer that a step's reports end."""
    return {
        (direction, req)
        for direction, name in ENDS.items()
        for req in getattr(reports, name, None) or ()
    }


def block_state(req_ids: set[str], get_block_ids: Any) -> Any:
    """Return what build_connector_meta may read about blocks; None until 0.26."""
    if KVConnectorBlockState is None:
        return None
    if "block_ids" in _STATE_FIELDS:  # until 0.30: block ids are collected in advance
        return KVConnectorBlockState({req_id: get_block_ids(req_id) for req_id in req_ids}, {})
    return KVConnectorBlockState(req_ids, get_block_ids, boundary_state_offloads={})


# -- a worker's step


@lru_cache(maxsize=64)
def _parameters(function: Any) -> frozenset[str]:
    """Return the names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def forward_context(metadata: Any, config: VllmConfig, **arguments: Any) -> Any:
    """Call set_forward_context with the arguments that it takes (`slot_mapping`: since 0.16)."""
    known = _parameters(set_forward_context)
    return set_forward_context(
        metadata, config, **{name: value for name, value in arguments.items() if name in known}
    )


def layer_cache(tensor: torch.Tensor) -> Any:
    """Return a layer's `kv_cache`: until 0.18 a list with one tensor per virtual engine."""
    return [tensor] if "virtual_engine" in ForwardContext.__dataclass_fields__ else tensor


def handle_preemptions(connector: Any, output: SchedulerOutput) -> None:
    """Call the hook as model runner V1 of the installed release does."""
    if PREEMPTIONS_BY_METADATA:
        connector.handle_preemptions(output.kv_connector_metadata)
    elif output.preempted_req_ids and "handle_preemptions" not in UNRECORDED:
        connector.handle_preemptions(output.preempted_req_ids)


def collecting(output: SchedulerOutput, *, defer: bool) -> Any:
    """Return the context in which model runner V1 computes.

    `defer`: the save is finished by finish_deferred (since 0.18).
    """
    mixin = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output
    return mixin(output, defer_finalize=defer) if CAN_DEFER else mixin(output)


def finish_deferred() -> None:
    """Finish what `collecting(defer=True)` left to do after the drafter."""
    if CAN_DEFER:
        KVConnectorModelRunnerMixin.finalize_kv_connector()


def output_without_forward(collected: KVConnectorOutput) -> ModelRunnerOutput:
    """Return the result of a step without a forward pass; an empty report is left out (R201)."""
    if hasattr(ModelRunnerOutput, "with_kv_conn_output_only"):  # since 0.22
        return ModelRunnerOutput.with_kv_conn_output_only(collected)
    return runner_output(reports=None if collected.is_empty() else collected)


def finish_forward(active: Any) -> None:
    """Call ActiveKVConnector.finish_forward, which releases until 0.30 do not have."""
    if hasattr(active, "finish_forward"):
        active.finish_forward()


def post_forward(
    active: Any, output: SchedulerOutput, *, defer: bool = False
) -> KVConnectorOutput | None:
    """Call ActiveKVConnector.post_forward.

    It takes the scheduler output until 0.22, later the ids of the finished requests. `defer`: the
    save is finished by finish_step (since 0.33).
    """
    known = _parameters(type(active).post_forward)
    subject = output if "scheduler_output" in known else output.finished_req_ids
    options = {"defer_finalize": defer} if "defer_finalize" in known else {}
    return active.post_forward(subject, **options)  # type: ignore[no-any-return]


def finish_step(active: Any) -> None:
    """Finish what `post_forward(defer=True)` left to do after the drafter."""
    if hasattr(active, "finalize_step"):
        active.finalize_step()


def pre_forward(
    active: Any, output: SchedulerOutput, batch: Any, metadata: Any, load_arguments: dict[str, Any]
) -> None:
    """Call ActiveKVConnector.pre_forward.

    It takes the scheduler output until 0.30, in 0.31 also start_load_kv's arguments, later the
    batch and the attention metadata from which it builds them.
    """
    parameters = _parameters(type(active).pre_forward)
    if "input_batch" in parameters:
        active.pre_forward(output, batch, metadata)
    elif len(parameters) > 2:  # `self` is one of them
        active.pre_forward(**{**load_arguments, "scheduler_output": output})
    else:
        active.pre_forward(output)


# -- requests


class AnyText(StructuredOutputGrammar):
    """A compiled grammar that allows every token and never ends; it has no state.

    The grammar must not influence what the harness samples.
    """

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        bitmask[batch_index].fill_(-1)

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        pass


STOP_TOKEN = 1
REPEATED_TOKEN = 2
SENTINEL = 3
"""Stands for an embedding in a prompt that has token ids, too."""
_WANTS_EOS = "eos_token_id" in inspect.signature(Request.__init__).parameters
LATER_REQUEST_FIELDS: dict[str, Any] = {
    "is_prefill_chunk": False,
    "resumable": False,
    "last_sched_seq": 0,
    "num_in_flight_tokens": 0,
    "num_stale_output_tokens": 0,
    "drop_stale_output": False,
}
"""State of the reference scheduler that Request lacks until 0.15, 0.25 and 0.28."""


EMBEDDING_WIDTH = 8


@lru_cache(maxsize=64)
def _hasher(block_size: int) -> Any:
    return get_request_block_hasher(block_size, sha256)


def item_identifier(name: str, alike: Mapping[str, Any] | None = None) -> str:
    """Return the identifier of a multi-modal item: 64 hexadecimal digits, like vLLM's hashes.

    `alike` (kvconform.contract.steps.Alike): digits that another item's identifier has, too.
    """
    own = hashlib.sha256(name.encode()).hexdigest()
    if not alike:
        return own
    other = hashlib.sha256(alike["id"].encode()).hexdigest()
    first, last = alike["first"], len(own) - alike["last"]
    between = own[first:last]
    if between == other[first:last]:
        between = f"{(int(between[0], 16) + 1) % 16:x}{between[1:]}"
    return other[:first] + between + other[last:]


def prompt_embeddings(content: str, length: int) -> torch.Tensor:
    """Return embeddings [length, 8] in float32: rows that depend on `content` and position."""
    base = text_id(f"embeds:{content}")
    values = [mix64(base + index) % 2048 / 1024 - 1 for index in range(length * EMBEDDING_WIDTH)]
    return torch.tensor(values, dtype=torch.float32).view(length, EMBEDDING_WIDTH)


def joined_embeddings(parts: Sequence[tuple[str, int, int]], length: int) -> torch.Tensor:
    """Return the embeddings of a prompt of `length` tokens; zeros for those that have token ids.

    `parts`: (content, first row, end).
    """
    rows = [prompt_embeddings(content, end)[start:] for content, start, end in parts]
    return torch.cat([*rows, torch.zeros(length - parts[-1][2], EMBEDDING_WIDTH)])


def build_request(
    req_id: str,
    tokens: list[int],
    *,
    max_tokens: int,
    block_size: int,
    stop: bool,
    repeats: bool = False,
    salt: str | None,
    lora: Adapter | None,
    items: list[dict[str, Any]],
    embeds: Sequence[tuple[str, int, int]] = (),
    priority: int,
    params: dict[str, Any] | None,
    skip_reading_prefix_cache: bool,
    structured: bool = False,
    session: bool = False,
    pooling: bool = False,
    arrival: float,
) -> Request:
    """Return vLLM's own Request, as the engine core would make it.

    `repeats`: ends if it samples a token twice in a row. `structured`: with a grammar that is still
    being compiled. `embeds`: the prompt begins with embeddings, these (content, first row, end), in
    place of which `tokens` has zeros. `session`: it can be continued. `pooling`: it is a pooling
    model's, without sampling parameters.
    """
    sampling = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        temperature=0,
        stop_token_ids=[STOP_TOKEN] if stop else None,
        extra_args={"kv_transfer_params": params} if params is not None else None,
        structured_outputs=StructuredOutputsParams(regex=".*") if structured else None,
    )
    sampling.update_from_generation_config({}, 2)
    if repeats:
        from vllm.sampling_params import RepetitionDetectionParams  # older releases have none

        sampling.repetition_detection = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=item_identifier(item["id"], item.get("alike")),
            mm_position=PlaceholderRange(offset=int(item["at"]), length=int(item["length"])),
        )
        for item in items
    ]
    # In a mixed prompt the front end puts a token id in place of each embedding; it is not used.
    rows = embeds[-1][2] if embeds else 0
    is_mixed = 0 < rows < len(tokens)
    ids = [SENTINEL] * rows + tokens[rows:] if is_mixed else list(tokens)
    request = Request(
        request_id=req_id,
        prompt_token_ids=None if rows == len(tokens) else ids,
        prompt_embeds=joined_embeddings(embeds, len(tokens)) if embeds else None,
        **({"prompt_is_token_ids": [n >= rows for n in range(len(ids))]} if is_mixed else {}),
        sampling_params=None if pooling else sampling,
        pooling_params=PoolingParams(task="embed") if pooling else None,
        arrival_time=arrival,
        mm_features=features or None,
        lora_request=LoRARequest(lora.name, lora.number, lora.path) if lora else None,
        cache_salt=salt,
        priority=priority,
        block_hasher=_hasher(block_size),
        **({"eos_token_id": None} if _WANTS_EOS else {}),
        **({"resumable": True} if session else {}),
    )
    if request.structured_output_request is not None:
        request.structured_output_request.grammar = Future()
    if skip_reading_prefix_cache:
        request.skip_reading_prefix_cache = True
    for name, value in LATER_REQUEST_FIELDS.items():
        if not hasattr(request, name):
            setattr(request, name, value)
    return request
