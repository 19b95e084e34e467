# SPDX-License-Identifier: Apache-2.0
"""How vLLM is started in a child process."""

from __future__ import annotations

import os
from typing import Any

from kvconform.live.job import Job
from kvconform.live.scenario import BLOCK_SIZE, MAX_MODEL_LEN

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
}
"""Of every child, unless the settings say otherwise. Compiling takes longer than all that a tiny model computes."""


def surroundings() -> None:
    """What has to be there before vLLM is configured: our plugin, which puts probe, adapters and device into this process. vLLM loads it
    in the processes that it starts itself."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def engine(job: Job) -> Any:
    """vLLM's LLM."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    start = job.start
    options: dict[str, Any] = {}
    if start["spec_tokens"]:
        drafts = start["spec_tokens"]
        options["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 2,
        }  # fmt: skip
    if start["priority"]:
        options["scheduling_policy"] = "priority"
    if job.transfer is not None:
        options["kv_transfer_config"] = KVTransferConfig(**job.transfer)
    assert bool(int(os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"])) is start["processes"]
    return LLM(
        model=job.model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        seed=0,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=start["blocks"],
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=start["max_seqs"],
        max_num_batched_tokens=start["budget"],
        enable_chunked_prefill=True,
        enable_prefix_caching=start["prefix_caching"],
        async_scheduling=start["scheduling"] == "async",
        disable_log_stats=False,
        **options,
    )
