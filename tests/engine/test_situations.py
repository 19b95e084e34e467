# SPDX-License-Identifier: Apache-2.0
"""Tests that vLLM's unpatched scheduler does what spec/situations.yaml says that it does.

Every situation with `vllm: true` is brought about on engine `vllm`, without policies.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from core_rig import REFERENCE, check_ok, run_case, select
from kvconform.contract.loader import load_spec
from kvconform.contract.situation import situations

SPEC = load_spec()
Trace = list[dict[str, Any]]
Steps = list[dict[str, Any]]


def add(req: str, prompt: Any, **more: Any) -> dict[str, Any]:
    return {"add": {"req": req, "prompt": prompt, **more}}


RUN: dict[str, Any] = {"run": {}}


def mixed_blocks(trace: Trace) -> bool:
    """Blocks that were allocated together are not in ascending order."""
    tables = [e["table"] for e in select(trace, "req.scheduled")]
    return any(b < a for table in tables for a, b in pairwise(table))


def lookups_repeat(trace: Trace) -> bool:
    """A request was looked up twice before its first allocation."""
    kinds = [e["kind"] for e in trace if e["kind"] in ("lookup", "alloc") and e["req"] == "b"]
    return kinds[:2] == ["lookup", "lookup"] and "alloc" in kinds


def hit_unused(trace: Trace) -> bool:
    """A hit was answered, and nothing was granted."""
    (answer,) = [e["tokens"] for e in select(trace, "lookup", req="b")]
    return bool(answer) and {e["external"] for e in select(trace, "alloc", req="b")} == {0}


def chunk_ends_within_block(trace: Trace) -> bool:
    ends = [e["computed"] + e["scheduled"] for e in select(trace, "req.scheduled", req="a")]
    return any(end % 4 for end in ends if end < 13)


POLICIES: dict[str, tuple[Steps, dict[str, Any], Callable[[Trace], bool]]] = {
    "permute-blocks": (
        [add("a", 13), add("b", 9), RUN, {"drop-local": {}}, add("c", 26), RUN],
        {"num_blocks": 9},
        mixed_blocks,
    ),
    "deny-first-alloc": (
        [add("a", 13, max_tokens=8), {"step": 1}, add("b", 17), RUN],
        {"num_blocks": 8},
        lookups_repeat,
    ),
    "ignore-hits": (
        [
            add("a", 13),
            RUN,
            {"drop-local": {}},
            add("b", {"same": "a"}, skip_reading_prefix_cache=True),
            RUN,
        ],
        {},
        hit_unused,
    ),
    "split-prefill": ([add("a", 13), RUN], {"budget": 3}, chunk_ends_within_block),
}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_vllm_takes_the_liberty_without_the_policy(name: str, tmp_path: Path) -> None:
    steps, config, happened = POLICIES[name]
    run = run_case(REFERENCE, steps, tmp_path, engine="vllm", config=config)
    check_ok(run)
    assert run.trace[0]["policies"] == []
    assert happened(run.trace), "the situation was not brought about"


def test_every_liberty_that_vllm_takes_is_tested() -> None:
    wanted = {name for name, each in situations().items() if each.of == "policy" and each.vllm}
    assert wanted == POLICIES.keys()


@pytest.mark.parametrize(
    "name", sorted(name for name, each in situations().items() if each.of == "step" and each.vllm)
)
def test_a_case_without_policies_does_the_step_on_engine_vllm(name: str) -> None:
    """Whether its point is reached, the gate says; tests/dev/test_defects.py runs all of them."""
    found = [
        case.id
        for case in SPEC.cases.values()
        if name in case.situations and not case.policies and "vllm" in case.engines
    ]
    assert found


@pytest.mark.parametrize("axis", ["scheduling", "runner", "depth", "block_size"])
def test_every_point_of_an_axis_is_run_on_engine_vllm(axis: str) -> None:
    variants = [each for case in SPEC.cases.values() for each in case.variants()]
    points = {getattr(each, axis) for each in variants}
    assert points == {getattr(each, axis) for each in variants if each.engine == "vllm"}


@pytest.mark.parametrize("engine", ["reference", "vllm"])
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_a_preempted_request_does_not_resume_in_the_next_step(
    engine: str, scheduling: str, tmp_path: Path
) -> None:
    """As in vLLM: a step with a preemption admits no waiting request."""
    steps = [add("a", 9, max_tokens=6), {"step": 3}, {"preempt": "a"}, add("b", 5), RUN]
    run = run_case(REFERENCE, steps, tmp_path, engine=engine, scheduling=scheduling)
    check_ok(run)
    (preempted,) = [e["step"] for e in select(run.trace, "step.scheduled") if e["preempted"]]
    scheduled = [e["step"] for e in select(run.trace, "req.scheduled")]
    assert preempted not in scheduled
    assert preempted + 1 in scheduled
