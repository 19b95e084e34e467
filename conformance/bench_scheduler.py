# SPDX-License-Identifier: Apache-2.0
"""How fast the reference scheduler steps, compared with vLLM's own: one process, one workload, a connector that does nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from kvconform import compat
from kvconform.compat_request import build_request
from kvconform.refimpl.scheduler import ReferenceScheduler

BLOCK_SIZE = 16


class IdleConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """A connector that stores and loads nothing: what remains is the engine's own work."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def compare(
    requests: int = 1000, prompt: int = 200, output: int = 64, max_seqs: int = 256, rounds: int = 3, scheduling: str = "sync"
) -> dict[str, Any]:
    """Steps per second of both schedulers, best of `rounds` alternating runs, and their ratio (above 1: the reference is faster).

    `prompt` and `output` are tokens per request. Only schedule() and update_from_output() are timed.
    """
    blocks = 1 + max_seqs * (-(-(prompt + output) // BLOCK_SIZE))
    transfer = compat.transfer_config("IdleConnector", "kv_both", {}, __name__, "recompute", "bench")
    config = compat.build_config(
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        budget=8192,
        max_seqs=max_seqs,
        max_model_len=prompt + output + 1,
        prefix_caching=True,
        spec_tokens=0,
        scheduling=scheduling,
        runner="v1",
        policy="fcfs",
        transfer=transfer,
    )
    cache_config = compat.build_cache_config(blocks, BLOCK_SIZE, 1, 64, ["layer.0"])

    def reference() -> Any:
        connector = IdleConnector(config, compat.KVConnectorRole.SCHEDULER, cache_config)
        return ReferenceScheduler(config, cache_config, connector, block_size=BLOCK_SIZE, async_scheduling=scheduling == "async")

    def vllm() -> Any:
        return compat.build_scheduler(config, cache_config, block_size=BLOCK_SIZE, scheduling=scheduling, runner="v1")

    best: dict[str, float] = {}
    steps = 0
    for _ in range(rounds):
        for name, build in (("reference", reference), ("vllm", vllm)):
            steps, seconds = _run(build, requests, prompt, output, scheduling)
            best[name] = max(best.get(name, 0.0), steps / seconds)
    return {
        "steps": steps,
        "reference_steps_per_s": round(best["reference"], 1),
        "vllm_steps_per_s": round(best["vllm"], 1),
        "ratio": round(best["reference"] / best["vllm"], 3),
        "vllm": compat.VLLM_VERSION,
    }


def _run(build: Callable[[], Any], requests: int, prompt: int, output: int, scheduling: str) -> tuple[int, float]:
    """(steps, seconds inside the scheduler) of one workload from the first request to the last."""
    scheduler = build()
    for i in range(requests):
        scheduler.add_request(_request(f"r{i}", [(i * 131 + j * 7) % 5000 for j in range(prompt)], output))
    pending: list[tuple[Any, Any]] = []
    depth = 1 if scheduling == "sync" else 2
    steps, seconds = 0, 0.0
    gc.collect()
    gc.disable()
    try:
        while scheduler.has_requests() or pending:
            if scheduler.has_requests():
                start = time.perf_counter()
                decided = scheduler.schedule()
                seconds += time.perf_counter() - start
                pending.append((decided, _sample(scheduler, decided)))
                steps += 1
            if len(pending) == depth or not scheduler.has_requests():
                landing = pending.pop(0)
                start = time.perf_counter()
                scheduler.update_from_output(*landing)
                seconds += time.perf_counter() - start
    finally:
        gc.enable()
    return steps, seconds


def _request(req_id: str, tokens: list[int], output: int) -> Any:
    return build_request(
        req_id,
        tokens,
        max_tokens=output,
        block_size=BLOCK_SIZE,
        stop=False,
        salt=None,
        lora=None,
        items=[],
        priority=0,
        params=None,
        skip_reading_prefix_cache=False,
        arrival=0.0,
    )


def _sample(scheduler: Any, decided: Any) -> Any:
    req_ids = list(decided.num_scheduled_tokens)
    return compat.ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req: i for i, req in enumerate(req_ids)},
        sampled_token_ids=[[] if scheduler.requests[req].is_prefill_chunk else [7] for req in req_ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
