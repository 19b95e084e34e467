# SPDX-License-Identifier: Apache-2.0
"""Which platform vLLM says it runs on: a CUDA one to whoever copies KV, the one that is there to vLLM's own engine.

`vllm.platforms.current_platform` is one object that every module imports by name, so its class is exchanged, not the object. vLLM's
configuration, engine arguments, parallel state, scheduler and forward context (the modules below, found by noting who asks what while the
suite runs) must go on as on the machine that it is: they would choose attention back ends, graphs and process groups that are not there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm.platforms
from vllm.platforms.interface import DeviceCapability

ENGINE = (
    "vllm._aiter_ops",
    "vllm.attention",
    "vllm.compilation",
    "vllm.config",
    "vllm.distributed.device_communicators",
    "vllm.distributed.ec_transfer",
    "vllm.distributed.parallel_state",
    "vllm.engine",
    "vllm.forward_context",
    "vllm.logger",
    "vllm.lora",
    "vllm.model_executor",
    "vllm.multimodal",
    "vllm.platforms",
    "vllm.transformers_utils",
    "vllm.usage",
    "vllm.v1.attention",
    "vllm.v1.core",
    "vllm.v1.engine",
    "vllm.v1.executor",
    "vllm.v1.metrics",
    "vllm.v1.sample",
    "vllm.v1.spec_decode",
    "vllm.v1.worker",
)
"""Modules that are told the truth. Everybody else is a connector, or works for one."""

ANSWERS: dict[str, Any] = {
    "device_type": "cuda",
    "device_name": "cuda",
    "dispatch_key": "CUDA",
    "ray_device_key": "GPU",
    "device_control_env_var": "CUDA_VISIBLE_DEVICES",
    "is_cuda": lambda: True,
    "is_cuda_alike": lambda: True,
    "is_rocm": lambda: False,
    "is_xpu": lambda: False,
    "is_tpu": lambda: False,
    "is_cpu": lambda: False,
    "is_out_of_tree": lambda: False,
    "is_unspecified": lambda: False,
    "is_pin_memory_available": lambda: True,
    "is_uva_available": lambda: False,
    "is_integrated_gpu": lambda device_id=0: False,
    "set_device": lambda device: torch.cuda.set_device(device),
    "get_device_name": lambda device_id=0: "emulated CUDA device",
    "get_device_capability": lambda device_id=0: DeviceCapability(9, 0),
    "has_device_capability": lambda capability, device_id=0: _number(capability) <= 90,
    "is_device_capability": lambda capability, device_id=0: _number(capability) == 90,
}


def _number(capability: Any) -> int:
    """(major, minor) or an integer as an integer, such as 90."""
    return capability[0] * 10 + capability[1] if isinstance(capability, tuple) else int(capability)


def _works_for_the_engine(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in ENGINE)


@contextmanager
def platform_is_cuda() -> Iterator[None]:
    """Let the current platform answer as a CUDA one, to everybody but the engine. Changes the class of the platform object; restores it."""
    platform: Any = vllm.platforms.current_platform
    own = type(platform)

    class Emulated(own):  # type: ignore[misc,valid-type]
        """The platform that is there, with other answers for some."""

        def __getattribute__(self, name: str) -> Any:
            if name.startswith("_") or _works_for_the_engine(
                sys._getframe(1).f_globals.get("__name__", "")
            ):
                return super().__getattribute__(name)
            if name in ANSWERS:
                return ANSWERS[name]
            if not hasattr(own, name) and hasattr(
                torch.cuda, name
            ):  # Stream, current_stream, synchronize, ...: as Platform itself does
                return getattr(torch.cuda, name)
            return super().__getattribute__(name)

    Emulated.__name__, Emulated.__qualname__, Emulated.__module__ = (
        own.__name__,
        own.__qualname__,
        own.__module__,
    )
    platform.__class__ = Emulated
    try:
        yield
    finally:
        platform.__class__ = own
