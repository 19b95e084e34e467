# SPDX-License-Identifier: Apache-2.0
"""What the reference scheduler takes from vLLM's configuration, and the named liberties ("policies") that it may be told to take."""

from __future__ import annotations

from typing import Any

from kvconform.compat.vllm_api import later

POLICIES = {
    "reuse-freed-first": "Freed blocks, hashed or not, are the first to be handed out again: who still reads them reads another's KV.",
    "permute-blocks": "Blocks that are allocated together are handed out in reverse order: a table is not an ascending run.",
    "deny-first-alloc": "The first admission of every request finds no room once, after its lookup: lookups repeat without an allocation.",
    "ignore-hits": "External hits are looked up and not used (R033): the truth is the count in update_state_after_alloc.",
    "reverse-batch": "The requests of one step are listed in reverse order: the order inside a step means nothing.",
    "split-prefill": "Prefill chunks are shorter than a block: boundaries fall inside blocks.",
}


class Settings:
    """Scheduling constants of one engine; tokens, unless the name says blocks. ValueError for what this engine does not do."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        block_size: int,
        async_scheduling: bool,
        runner: str,
        policies: frozenset[str],
    ) -> None:
        scheduler, spec, transfer = (
            vllm_config.scheduler_config,
            vllm_config.speculative_config,
            vllm_config.kv_transfer_config,
        )
        unsupported = {
            f"unknown policies {sorted(policies - POLICIES.keys())}": not policies
            <= POLICIES.keys(),
            f"runner {runner!r}": runner not in ("v1", "v2"),
            "more than one KV cache group": len(kv_cache_config.kv_cache_groups) != 1,
            "pipeline parallelism": vllm_config.parallel_config.pipeline_parallel_size > 1,
            "EAGLE drafters (they recompute the last hit block)": spec is not None
            and spec.use_eagle(),
            "a draft length that depends on the batch size": spec is not None
            and bool(later(spec, "num_speculative_tokens_per_batch_size", None)),
        }
        for what in (what for what, present in unsupported.items() if present):
            raise ValueError(f"The reference scheduler does not support {what}.")
        self.policies = policies
        self.v2 = runner == "v2"  # output protocol of model runner V2 (R062)
        self.is_async = async_scheduling
        self.priority = scheduler.policy == "priority"
        self.block_size = block_size
        self.num_blocks: int = kv_cache_config.num_blocks  # including the null block 0
        self.prefix_caching: bool = vllm_config.cache_config.enable_prefix_caching
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.max_running: int = (
            later(scheduler, "max_num_active_seqs", None) or scheduler.max_num_seqs
        )  # requests
        self.token_budget: int = (
            scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
        )  # per step
        self.input_budget: int = (
            scheduler.max_num_batched_tokens
        )  # rows of the model's input: tokens, and draft slots of each request
        self.num_spec: int = later(
            vllm_config, "num_speculative_tokens", spec.num_speculative_tokens if spec else 0
        )  # drafts per step
        self.num_lookahead: int = later(
            vllm_config, "num_lookahead_tokens", 0
        )  # slots beyond the scheduled tokens, for the drafter
        self.draft_slots: int = (
            later(spec, "max_num_new_slots_for_drafting", 0) if spec is not None else 0
        )
        # What one verification step may need is kept free beside an asynchronous load.
        self.spec_step_blocks = (
            -(-(1 + self.num_spec + self.num_lookahead) // block_size) if self.num_spec else 0
        )
        split = "split-prefill" in policies
        # Longest chunk while others wait; 0: no limit.
        self.long_prefill: int = (
            max(block_size - 1, 1 + self.num_spec)
            if split
            else scheduler.long_prefill_token_threshold
        )
        self.long_prefill_adaptive: bool = (
            later(scheduler, "long_prefill_token_threshold_adaptive", False) and not split
        )
        self.chunked_prefill: bool = scheduler.enable_chunked_prefill
        self.reserve_full_prompt: bool = later(
            scheduler, "scheduler_reserve_full_isl", False
        )  # admit only what fits as a whole
        self.watermark_blocks = int(later(scheduler, "watermark", 0.0) * self.num_blocks)
        self.recompute_failed_loads: bool = (
            transfer is None
            or later(transfer, "kv_load_failure_policy", "recompute") == "recompute"
        )
        # A consumer's blocks stay allocated while a step that may write them is in flight (R150).
        self.defer_frees: bool = (
            async_scheduling and transfer is not None and transfer.is_kv_consumer
        )
