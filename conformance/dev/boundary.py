# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the placeholder boundary: what it adds to a step of vLLM.

A connector carries the boundary of each request of a step to its worker half: computed tokens
without placeholders, and min(computed + scheduled, known tokens) as the end of a save.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

REQUESTS = (64, 256, 1000)
BAR = 1.0
"""Per cent of a step that the boundary may take."""
BLOCK = 16
VOCABULARY = 500
"""Tokens that the tiny model has, at least."""
PROMPT = 2 * BLOCK
STEPS = 60
"""Measured steps of decoding, after as many others."""


def boundaries(requests: dict[str, Any], output: Any) -> dict[str, tuple[int, int]]:
    """Return, per request of a step, what is real before it and what is final after it."""
    cached = output.scheduled_cached_reqs
    found = {}
    scheduled = output.num_scheduled_tokens
    # Written for speed: with min(), a request took 234 ns instead of 165.
    for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        request = requests[req_id]
        end, known = computed + scheduled[req_id], request.num_tokens
        real = computed - request.num_output_placeholders
        found[req_id] = real, end if end < known else known
    return found


def measure() -> dict[str, float]:
    """Measure steps with and without the boundary, in turns.

    Returns, by number of requests, medians of processor time:
    - `step_us`, `with_us`: microseconds of a step of vLLM's scheduler (schedule and update),
      without and with the boundary;
    - `boundary_us`: microseconds of the boundary alone;
    - `of_scheduler`: its part of such a step without it, in per cent;
    - `whole_us`: microseconds of a step of vLLM with the tiny model, on a CPU;
    - `share`: the boundary's part of that, in per cent (see `BAR`). A larger model takes longer;
    - `per_request_ns`: nanoseconds of the boundary per request. It is O(requests) if that is flat.
    """
    found: dict[str, float] = {}
    for count in REQUESTS:
        plain: list[float] = []
        carrying: list[float] = []
        alone: list[float] = []
        for number, (whole, boundary) in enumerate(_steps(count)):
            if number >= STEPS:
                (carrying if boundary else plain).append(whole)
            if number >= STEPS and boundary:
                alone.append(boundary)
        step, own = median(plain), median(alone)
        found[f"{count}_step_us"] = 1e6 * step
        found[f"{count}_with_us"] = 1e6 * median(carrying)
        found[f"{count}_boundary_us"] = 1e6 * own
        found[f"{count}_of_scheduler"] = 100 * own / step
        whole = median(_whole_steps(count))
        found[f"{count}_whole_us"] = 1e6 * whole
        found[f"{count}_share"] = 100 * own / whole
        found[f"{count}_per_request_ns"] = 1e9 * own / count
    return found


def problems(found: Mapping[str, float]) -> list[str]:
    """Return a sentence per share that `measure` found to be too large."""
    return [
        f"{name} is {value:.2f} % of a step; it must be below {BAR:g} %"
        for name, value in found.items()
        if name.endswith("_share") and value >= BAR
    ]


def _steps(count: int) -> Iterator[tuple[float, float]]:
    """Yield seconds of processor time of steps, and of the boundary in them: 0 in every other one.

    All requests decode, with one step in flight when the next one is scheduled.
    """
    from kvconform.compat.step import runner_output

    scheduler = _scheduler(count)
    flight: deque[Any] = deque()
    steps = 0
    while steps < 2 * STEPS:
        began = time.process_time()
        output = scheduler.schedule()
        boundary = 0.0
        ids = list(output.num_scheduled_tokens)
        decodes = len(output.scheduled_cached_reqs.req_ids) == count
        if decodes and steps % 2:
            before = time.process_time()
            found = boundaries(scheduler.requests, output)
            boundary = time.process_time() - before
            assert len(found) == count
        flight.append((output, runner_output(ids, [[7]] * len(ids))))
        if len(flight) > 1:
            scheduler.update_from_output(*flight.popleft())
        if decodes:
            steps += 1
            yield time.process_time() - began, boundary


def _whole_steps(count: int) -> list[float]:
    """Return seconds of processor time of steps in which vLLM decodes `count` requests."""
    from kvconform.live.start import ENVIRONMENT

    os.environ.update({**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    from vllm import LLM, SamplingParams

    from kvconform.compat.vllm_api import model_path

    engine = LLM(
        model=model_path(),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=2 * (PROMPT + STEPS),
        max_num_seqs=count,
        max_num_batched_tokens=count * PROMPT,
    ).llm_engine
    how = SamplingParams(max_tokens=2 * STEPS, temperature=0, ignore_eos=True, detokenize=False)
    for number in range(count):
        tokens = [(number + place) % VOCABULARY for place in range(PROMPT)]
        engine.add_request(f"r{number}", {"prompt_token_ids": tokens}, how)
    seconds = []
    engine.step()  # the prompts
    for _ in range(STEPS):
        began = time.process_time()
        engine.step()
        seconds.append(time.process_time() - began)
    engine.engine_core.shutdown()
    return seconds


def _scheduler(count: int) -> Any:
    """Return vLLM's asynchronous scheduler, without a connector, with `count` requests."""
    from kvconform.compat import vllm_api
    from kvconform.compat.step import build_request

    outputs = 4 * STEPS
    each = -(-(PROMPT + outputs) // BLOCK)
    config = vllm_api.build_config(
        block_size=BLOCK,
        num_blocks=count * each + 1,
        budget=count * PROMPT,
        max_seqs=count,
        max_model_len=each * BLOCK,
        scheduling="async",
    )
    layers = ["model.layers.0.self_attn.attn"]
    cache = vllm_api.build_cache_config(count * each + 1, BLOCK, 1, 8, layers)
    scheduler = vllm_api.build_scheduler(
        config, cache, block_size=BLOCK, scheduling="async", runner="v1"
    )
    for number in range(count):
        tokens = [1000 + (number * PROMPT + place) % 50_000 for place in range(PROMPT)]
        scheduler.add_request(
            build_request(
                f"r{number}",
                tokens,
                max_tokens=outputs,
                block_size=BLOCK,
                stop=False,
                salt=None,
                lora=None,
                items=[],
                priority=0,
                params=None,
                skip_reading_prefix_cache=False,
                arrival=float(number),
            )
        )
    return scheduler
