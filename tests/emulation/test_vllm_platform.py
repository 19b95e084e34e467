# SPDX-License-Identifier: Apache-2.0
"""Tests of what vLLM's modules report about the platform while a CUDA device is emulated.

They report one thing to connectors and another to the engine.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
import vllm._custom_ops as ops
from vllm.platforms import current_platform

from kvconform.emulation.emulate import emulate
from kvconform.emulation.vllm_on_cuda import vllm_on_cuda

QUESTIONS = (
    "is_cuda()",
    "is_cuda_alike()",
    "is_cpu()",
    "is_rocm()",
    "is_xpu()",
    "is_pin_memory_available()",
    "device_type",
)


def asked(module: str) -> list[Any]:
    """What the platform answers to code of a module with this name."""
    code = "[" + ", ".join(f"platform.{question}" for question in QUESTIONS) + "]"
    return list(eval(code, {"__name__": module, "platform": current_platform}))


@pytest.mark.parametrize(
    "module",
    [
        "vllm.v1.kv_offload.cpu.spec",
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils",
        "somebody.elses",
    ],
)
def test_connectors_find_a_cuda_platform(module: str) -> None:
    assert asked(module)[:2] == [False, False]
    with emulate("compute") as cuda, vllm_on_cuda(cuda):
        assert asked(module) == [True, True, False, False, False, True, "cuda"]
    assert asked(module)[:2] == [False, False]


@pytest.mark.parametrize(
    "module",
    ["vllm.config.vllm", "vllm.engine.arg_utils", "vllm.v1.core.sched.scheduler", "vllm.platforms"],
)
def test_the_engine_is_told_the_truth(module: str) -> None:
    truth = asked(module)
    with emulate("compute") as cuda, vllm_on_cuda(cuda):
        assert asked(module) == truth


def test_streams_of_the_platform_are_the_emulated_ones() -> None:
    with emulate("transfers") as cuda, vllm_on_cuda(cuda):
        assert current_platform.current_stream() == cuda.compute
        side = current_platform.Stream()
        with current_platform.stream(side):
            assert torch.cuda.current_stream() == side


def test_everything_is_put_back() -> None:
    def state() -> list[Any]:
        modules = [
            module
            for name, module in sorted(sys.modules.items())
            if name.startswith(("vllm.v1.kv_offload", "vllm.v1.simple_kv_offload"))
        ]
        names = (
            "PIN_MEMORY",
            "HAS_TRITON",
            "CudaRTLibrary",
            "_resolve_batch_memcpy",
            "_batch_memcpy",
            "swap_blocks_batch",
        )
        return [
            type(current_platform),
            ops.swap_blocks,
            *((vars(module).get(name)) for module in modules for name in names),
        ]

    with emulate("compute") as cuda, vllm_on_cuda(cuda):  # imports them
        pass
    before = state()
    with emulate("compute") as cuda, contextlib.suppress(ZeroDivisionError), vllm_on_cuda(cuda):
        assert state() != before
        raise ZeroDivisionError
    assert state() == before


def test_torch_compile_finds_no_function_under_two_names() -> None:
    """vLLM's modules compile functions when they are imported, perhaps within an emulation."""
    from torch._dynamo import trace_rules

    try:
        with emulate():
            trace_rules.clear_lru_cache()
            assert trace_rules.get_torch_obj_rule_map()
    finally:
        trace_rules.clear_lru_cache()
