# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Request, whatever the installed release wants to make one of."""

from __future__ import annotations

import inspect
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from kvconform.compat import Request
from kvconform.model import STOP_TOKEN
from kvconform.provenance import adapter_number

_WANTS_EOS = "eos_token_id" in inspect.signature(Request.__init__).parameters
LATER_REQUEST_FIELDS: dict[str, Any] = {  # what the reference scheduler keeps on a request, absent from Request until 0.15, 0.25 and 0.28
    "is_prefill_chunk": False,
    "resumable": False,
    "last_sched_seq": 0,
    "num_in_flight_tokens": 0,
    "num_stale_output_tokens": 0,
    "drop_stale_output": False,
}


@lru_cache(maxsize=64)
def _hasher(block_size: int) -> Any:
    return get_request_block_hasher(block_size, sha256)


def build_request(
    req_id: str,
    tokens: list[int],
    *,
    max_tokens: int,
    block_size: int,
    stop: bool,
    salt: str | None,
    lora: str | None,
    items: list[dict[str, Any]],
    priority: int,
    params: dict[str, Any] | None,
    skip_reading_prefix_cache: bool,
    structured: bool = False,
    arrival: float,
) -> Request:
    """vLLM's own Request, as the engine core would make it. `structured`: with a grammar that is still being compiled."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        temperature=0,
        stop_token_ids=[STOP_TOKEN] if stop else None,
        extra_args={"kv_transfer_params": params} if params is not None else None,
        structured_outputs=StructuredOutputsParams(regex=".*") if structured else None,
    )
    sampling.update_from_generation_config({}, 2)
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=str(item["id"]),
            mm_position=PlaceholderRange(offset=int(item["at"]), length=int(item["length"])),
        )
        for item in items
    ]
    request = Request(
        request_id=req_id,
        prompt_token_ids=list(tokens),
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=arrival,
        mm_features=features or None,
        lora_request=LoRARequest(lora, adapter_number(lora), f"/adapters/{lora}") if lora else None,
        cache_salt=salt,
        priority=priority,
        block_hasher=_hasher(block_size),
        **({"eos_token_id": None} if _WANTS_EOS else {}),
    )
    if request.structured_output_request is not None:
        request.structured_output_request.grammar = Future()
    if skip_reading_prefix_cache:
        request.skip_reading_prefix_cache = True
    for name, value in LATER_REQUEST_FIELDS.items():
        if not hasattr(request, name):
            setattr(request, name, value)
    return request
