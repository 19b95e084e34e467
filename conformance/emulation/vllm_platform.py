# SPDX-License-Identifier: Apache-2.0
"""The platform that vLLM reports: CUDA to connectors, another one to vLLM's own engine.

So it is on an emulated device, and on a real one if vLLM has no compiled parts.

`vllm.platforms.current_platform` is one object that every module imports by name, so its class is
replaced, not the object. vLLM's configuration, engine arguments, parallel state, scheduler and
forward context must see the real machine: otherwise they choose attention backends, graphs and
process groups that do not exist. The list of these modules (`ENGINE`) was found by recording which
module queries which attribute while the suite runs.
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
"""Modules that see the real platform. All others belong to a connector, or work for one."""

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
}
EMULATED = ("emulated CUDA device", (9, 0))


def _answers(device: str, capability: tuple[int, int]) -> dict[str, Any]:
    """Return all answers for a device of this name and compute capability."""
    number = _number(capability)
    return {
        **ANSWERS,
        "get_device_name": lambda device_id=0: device,
        "get_device_capability": lambda device_id=0: DeviceCapability(*capability),
        "has_device_capability": lambda capability, device_id=0: _number(capability) <= number,
        "is_device_capability": lambda capability, device_id=0: _number(capability) == number,
    }


def _number(capability: Any) -> int:
    """Return a capability, (major, minor) or an integer, as an integer such as 90."""
    return capability[0] * 10 + capability[1] if isinstance(capability, tuple) else int(capability)


def _works_for_the_engine(module: str) -> bool:
    """Return whether a module sees the real platform."""
    return any(module == name or module.startswith(f"{name}.") for name in ENGINE)


@contextmanager
def platform_is_cuda(device: str, capability: tuple[int, int]) -> Iterator[None]:
    """Make the current platform a CUDA one for all modules except the engine's.

    It has a device of this name and compute capability. Changes the class of the platform object,
    and restores it at the end.
    """
    platform: Any = vllm.platforms.current_platform
    own = type(platform)
    answers = _answers(device, capability)

    class Emulated(own):  # type: ignore[misc,valid-type]
        """The real platform with the attributes of a CUDA one."""

        def __getattribute__(self, name: str) -> Any:
            if name.startswith("_"):
                return super().__getattribute__(name)
            asking = sys._getframe(1).f_globals.get("__name__", "")
            if _works_for_the_engine(asking):
                return super().__getattribute__(name)
            if name in answers:
                return answers[name]
            # Stream, current_stream, synchronize, ...: vLLM's Platform forwards them the same way.
            if not hasattr(own, name) and hasattr(torch.cuda, name):
                return getattr(torch.cuda, name)
            return super().__getattribute__(name)

    Emulated.__name__ = own.__name__
    Emulated.__qualname__ = own.__qualname__
    Emulated.__module__ = own.__module__
    platform.__class__ = Emulated
    try:
        yield
    finally:
        platform.__class__ = own
