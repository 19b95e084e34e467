# SPDX-License-Identifier: Apache-2.0
"""What the reference scheduler takes from vLLM's configuration, and the named liberties ("policies") that it may be told to take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

POLICIES = {
    "reuse-freed-first": "Freed blocks, hashed or not, are the first to be handed out again: who still reads them reads another's KV.",
    "permute-blocks": "Blocks that are allocated together are handed out in reverse order: a table is not an ascending run.",
    "deny-first-alloc": "The first admission of every request finds no room once, after its lookup: lookups repeat without an allocation.",
    "ignore-hits": "External hits are looked up and not used (R033): the truth is the count in update_state_after_alloc.",
    "reverse-batch": "The requests of one step are listed in reverse order: the order inside a step means nothing.",
    "split-prefill": "Prefill chunks are shorter than a block: boundaries fall inside blocks.",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Scheduling constants of one engine. Tokens unless the name says blocks."""

    block_size: int
    num_blocks: int  # including the null block 0
    token_budget: int  # per step
    input_budget: int  # per step, rows of the model's input: tokens plus `draft_slots` for each request
    draft_slots: int
    max_running: int
    max_model_len: int
    long_prefill: int  # longest chunk while others wait; 0: no limit
    long_prefill_adaptive: bool
    chunked_prefill: bool
    reserve_full_prompt: bool  # admit only what fits as a whole
    watermark_blocks: int
    prefix_caching: bool
    priority: bool
    num_spec: int  # drafts per step
    num_lookahead: int  # slots beyond the scheduled tokens, for the drafter
    recompute_failed_loads: bool
    defer_frees: bool  # a consumer's blocks stay allocated while a step that may write them is in flight (R150)
    is_async: bool
    v2: bool  # output protocol of model runner V2 (R062)
    policies: frozenset[str]

    @property
    def spec_step_blocks(self) -> int:
        """Blocks that one verification step may need: kept free beside an asynchronous load."""
        return -(-(1 + self.num_spec + self.num_lookahead) // self.block_size) if self.num_spec else 0


def read_settings(
    vllm_config: Any, kv_cache_config: Any, block_size: int, async_scheduling: bool, runner: str, policies: Iterable[str]
) -> Settings:
    """Settings from vLLM's configuration. ValueError in one sentence for what this scheduler does not do."""
    scheduler, spec, transfer = vllm_config.scheduler_config, vllm_config.speculative_config, vllm_config.kv_transfer_config
    unknown = sorted(set(policies) - set(POLICIES))
    unsupported = {
        f"unknown policies {unknown}": bool(unknown),
        f"runner {runner!r}": runner not in ("v1", "v2"),
        "more than one KV cache group": len(kv_cache_config.kv_cache_groups) != 1,
        "pipeline parallelism": vllm_config.parallel_config.pipeline_parallel_size > 1,
        "context parallelism": vllm_config.parallel_config.decode_context_parallel_size > 1,
        "EAGLE drafters (they recompute the last hit block)": spec is not None and spec.use_eagle(),
        "a draft length that depends on the batch size": spec is not None and bool(spec.num_speculative_tokens_per_batch_size),
    }
    for what, present in unsupported.items():
        if present:
            raise ValueError(f"The reference scheduler does not support {what}.")
    num_spec = vllm_config.num_speculative_tokens
    split = "split-prefill" in policies
    return Settings(
        block_size=block_size,
        num_blocks=kv_cache_config.num_blocks,
        token_budget=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        input_budget=scheduler.max_num_batched_tokens,
        draft_slots=spec.max_num_new_slots_for_drafting if spec is not None else 0,
        max_running=scheduler.max_num_active_seqs or scheduler.max_num_seqs,
        max_model_len=vllm_config.model_config.max_model_len,
        long_prefill=max(block_size - 1, 1 + num_spec) if split else scheduler.long_prefill_token_threshold,
        long_prefill_adaptive=scheduler.long_prefill_token_threshold_adaptive and not split,
        chunked_prefill=scheduler.enable_chunked_prefill,
        reserve_full_prompt=scheduler.scheduler_reserve_full_isl,
        watermark_blocks=int(scheduler.watermark * kv_cache_config.num_blocks),
        prefix_caching=vllm_config.cache_config.enable_prefix_caching,
        priority=scheduler.policy == "priority",
        num_spec=num_spec,
        num_lookahead=vllm_config.num_lookahead_tokens,
        recompute_failed_loads=transfer is None or transfer.kv_load_failure_policy == "recompute",
        defer_frees=async_scheduling and transfer is not None and transfer.is_kv_consumer,
        is_async=async_scheduling,
        v2=runner == "v2",
        policies=frozenset(policies),
    )
