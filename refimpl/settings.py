# SPDX-License-Identifier: Apache-2.0
"""Settings of the reference scheduler: what it takes from vLLM's configuration, and its policies.

A policy is a liberty of the engine, which vLLM does not always take (spec/situations.yaml).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvconform.compat.vllm_api import later
from kvconform.contract.situation import policies as known_policies
from kvconform.refimpl.reach import Reach

SPECS = {FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec}
"""The kinds of KV cache groups that the reference engine supports."""


class Settings:
    """Scheduling constants of one engine, in tokens unless the name says blocks.

    ValueError for a configuration that the reference engine does not support.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        block_size: int,
        async_scheduling: bool,
        runner: str,
        policies: frozenset[str],
    ) -> None:
        for what in _unsupported(vllm_config, kv_cache_config, runner, policies):
            raise ValueError(f"The reference scheduler does not support {what}.")
        scheduler = vllm_config.scheduler_config
        spec = vllm_config.speculative_config
        transfer = vllm_config.kv_transfer_config

        self.policies = policies
        # The output protocol of model runner V2 (R062).
        self.v2 = runner == "v2"
        self.is_async = async_scheduling
        self.priority = scheduler.policy == "priority"
        self.block_size = block_size
        groups = kv_cache_config.kv_cache_groups
        self.groups = [Reach.of(group.kv_cache_spec, block_size) for group in groups]
        self.retention: int | None = later(kv_cache_config, "prefix_cache_retention_interval", None)
        # Including the null block 0.
        self.num_blocks: int = kv_cache_config.num_blocks
        self.prefix_caching: bool = vllm_config.cache_config.enable_prefix_caching
        self.max_model_len: int = vllm_config.model_config.max_model_len
        # Tokens that a step samples for a request without drafts; a pooling model's samples none.
        self.sampled_per_step = int(vllm_config.model_config.runner_type != "pooling")

        # In requests.
        self.max_running: int = (
            later(scheduler, "max_num_active_seqs", None) or scheduler.max_num_seqs
        )
        # Tokens per step.
        self.token_budget: int = (
            scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
        )
        # Tokens that may be scheduled before their steps have landed.
        self.most_in_flight: int = later(vllm_config, "max_in_flight_tokens", self.max_model_len)
        # Rows of the model's input per step: tokens, and draft slots of each request.
        self.input_budget: int = scheduler.max_num_batched_tokens

        # Drafts per step.
        spec_tokens = spec.num_speculative_tokens if spec else 0
        self.num_spec: int = later(vllm_config, "num_speculative_tokens", spec_tokens)
        # Slots beyond the scheduled tokens, for the drafter.
        self.num_lookahead: int = later(vllm_config, "num_lookahead_tokens", 0)
        self.draft_slots: int = 0
        if spec is not None:
            self.draft_slots = later(spec, "max_num_new_slots_for_drafting", 0)
        # An asynchronous load leaves the blocks free that one verification step may need.
        self.spec_step_blocks = 0
        if self.num_spec:
            rows = 1 + self.num_spec + self.num_lookahead
            self.spec_step_blocks = sum(-(-rows // group.block_size) for group in self.groups)

        # The longest chunk while other requests wait; 0: no limit.
        self.long_prefill: int = scheduler.long_prefill_token_threshold
        self.long_prefill_adaptive: bool = later(
            scheduler, "long_prefill_token_threshold_adaptive", False
        )
        if "split-prefill" in policies:
            self.long_prefill = max(block_size - 1, 1 + self.num_spec)
            self.long_prefill_adaptive = False
        self.chunked_prefill: bool = scheduler.enable_chunked_prefill
        # Admit a request only if all its tokens fit.
        self.reserve_full_prompt: bool = later(scheduler, "scheduler_reserve_full_isl", False)
        self.watermark_blocks = int(later(scheduler, "watermark", 0.0) * self.num_blocks)

        self.recompute_failed_loads: bool = (
            transfer is None
            or later(transfer, "kv_load_failure_policy", "recompute") == "recompute"
        )
        # A consumer's blocks stay allocated while a step that may write them is in flight (R150).
        self.defer_frees: bool = (
            async_scheduling and transfer is not None and transfer.is_kv_consumer
        )


def _unsupported(
    vllm_config: Any, kv_cache_config: Any, runner: str, policies: frozenset[str]
) -> Iterator[str]:
    """Yield what the reference engine does not support of a configuration."""
    spec = vllm_config.speculative_config
    unknown = policies - set(known_policies())
    if unknown:
        yield f"unknown policies {sorted(unknown)}"
    if runner not in ("v1", "v2"):
        yield f"runner {runner!r}"
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    for kind in {type(spec) for spec in specs} - SPECS:
        yield f"KV cache groups of {kind.__name__}"
    if any(
        isinstance(spec, ChunkedLocalAttentionSpec) and spec.attention_chunk_size % spec.block_size
        for spec in specs
    ):
        yield "chunks of local attention that are not whole blocks"
    if len({spec.block_size for spec in specs}) > 1:
        yield "KV cache groups with unlike block sizes"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        yield "pipeline parallelism"
    if spec is not None and spec.use_eagle():
        yield "EAGLE drafters (they recompute the last hit block)"
    if spec is not None and later(spec, "num_speculative_tokens_per_batch_size", None):
        yield "a draft length that depends on the batch size"
