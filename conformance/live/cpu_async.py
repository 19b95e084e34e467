# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling on a CPU, where vLLM turns it off: its scheduler runs a step ahead, as on a GPU, and the model runner computes at
once, as it does on a CPU."""

from __future__ import annotations

from typing import Any

ENVIRONMENT = "KVCONFORM_LIVE_ASYNC"
"""Environment variable: "1" for every process of a run with asynchronous scheduling."""


def install() -> None:
    """Change this process's vLLM for good: the configuration keeps the setting, and the CPU's model runner keeps the sampled tokens
    itself, instead of leaving them on a device. A second call changes nothing."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(CpuPlatform, "kvconform_async"):
        return
    platform: Any = CpuPlatform
    runner: Any = GPUModelRunner
    check, begin = platform.check_and_update_config.__func__, runner.__init__

    def kept(cls: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(cls, config)
        config.scheduler_config.async_scheduling = wanted

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.use_async_scheduling = False

    platform.check_and_update_config = classmethod(kept)
    runner.__init__ = init
    platform.kvconform_async = True
