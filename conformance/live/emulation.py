# SPDX-License-Identifier: Apache-2.0
"""The emulated CUDA device (docs/emulation.md) under vLLM's own worker on a CPU, for connectors that refuse to run without a GPU.

vLLM computes on the CPU as ever; the connector's worker half finds a CUDA device, on which the KV cache is. No stream is held back: all
that a hook queued is done as soon as it may be, and what the compute stream waits for is done when the hook returns. The adversaries
are the other engines'.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

ENVIRONMENT = "KVCONFORM_LIVE_EMULATE"
"""Environment variable: "1" for every process of a run on the emulated device."""
_open = ExitStack()
_installed = False


def install() -> None:
    """Enter the emulation for the rest of this process's life, before a connector is made and after the probe is there, which calls hooks
    of worker halves on the device. A second call changes nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    import vllm.v1.worker.cpu_worker  # noqa: F401  which puts stand-ins into torch.cuda when it is imported
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from kvconform import device
    from kvconform.compat import KVConnectorFactory
    from kvconform.emulated import Emulated
    from kvconform.probe import Probe, hook_names

    here: Any = _open.enter_context(device.opened("emulated", None))
    assert isinstance(here, Emulated) and Probe.active is not None
    probe = Probe.active
    for hook in hook_names():
        probe.on(hook, after=lambda call: here.finish() if call.half == "worker" else None)

    def mark(call: Any) -> None:
        for value in call.args[0].values() if isinstance(call.arg(0, "kv_caches"), dict) else [call.arg(0, "kv_cache")]:
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                here.cuda.to_device(tensor)

    for hook in ("register_kv_caches", "register_cross_layers_kv_cache"):
        probe.on(hook, before=mark)
    _keep(CPUModelRunner)
    factory: Any = KVConnectorFactory
    original = factory.create_connector

    @functools.wraps(original)
    def create(config: Any, role: Any, kv_cache_config: Any) -> Any:
        if getattr(role, "name", "") != "WORKER":
            return original(config=config, role=role, kv_cache_config=kv_cache_config)
        with here.calling():
            return original(config=config, role=role, kv_cache_config=kv_cache_config)

    factory.create_connector = create


def _keep(runner: Any) -> None:
    """The CPU's model runner makes torch.accelerator do nothing when it is made: put back what the emulation does there."""
    import torch

    names = ("synchronize", "empty_cache")
    ours = {name: getattr(torch.accelerator, name) for name in names}
    begin = runner.__init__

    @functools.wraps(begin)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        for name, function in ours.items():
            setattr(torch.accelerator, name, function)

    runner.__init__ = init
