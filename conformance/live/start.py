# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM in a child process, on a CPU, or on a GPU if its platform is CUDA.

If wanted, vLLM is changed before: it schedules asynchronously on a CPU, or its connector finds an
emulated CUDA device.
"""

from __future__ import annotations

import functools
import os
from contextlib import ExitStack
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from kvconform.contract.scenario import BLOCK_SIZE, MAX_MODEL_LEN
from kvconform.live.job import Job, dtype, memory

if TYPE_CHECKING:
    from kvconform.observe.call import Call
    from kvconform.refimpl.faulty import Fault

CPU_ASYNC = "KVCONFORM_LIVE_ASYNC"
"""Environment variable: "1" for every process of a run with asynchronous scheduling."""
EMULATE = "KVCONFORM_LIVE_EMULATE"
"""Environment variable: "1" for every process of a run on the emulated device."""
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
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
}
"""Environment of every child, unless the settings say otherwise.

TorchDynamo is off because compiling takes longer than everything that a tiny model computes, and
FlashInfer's sampler because it is compiled too; greedy tokens need no sampler.
"""
_open = ExitStack()
_installed = False
_faults: set[str] = set()


def install_cpu_async() -> None:
    """Make vLLM accept asynchronous scheduling on a CPU, in this process, for good.

    vLLM turns it off there, and only there. With this change its scheduler runs a step ahead, as on
    a GPU, while the model runner computes at once and keeps the sampled tokens itself, not on a
    device. Idempotent.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(CpuPlatform, "kvconform_async"):
        return
    platform: Any = CpuPlatform
    runner: Any = GPUModelRunner
    check = platform.check_and_update_config.__func__
    begin = runner.__init__

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


def install_emulation() -> None:
    """Enter the emulation (docs/emulation.md) for the rest of this process's life.

    For connectors that refuse to run without a GPU. vLLM's worker still computes on the CPU; the
    connector's worker half finds a CUDA device that holds the KV cache. The probe, which has to be
    installed before, calls the hooks of the worker half on the device. A connector has to be made
    after this. Streams are not delayed here, unlike on the other engines: work that a hook queued
    is done as soon as possible, and at the latest when the hook returns if the compute stream waits
    for it. Idempotent.
    """
    global _installed
    if _installed:
        return
    _installed = True
    # Puts stand-ins into torch.cuda when it is imported.
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from kvconform.compat.vllm_api import KVConnectorFactory
    from kvconform.kv.emulated import Emulated
    from kvconform.kv.gpu import opened
    from kvconform.observe.probe import Probe, hook_names

    here: Any = _open.enter_context(opened("emulated", None))
    assert isinstance(here, Emulated) and Probe.active is not None
    probe = Probe.active
    for hook in hook_names():
        probe.on(hook, after=lambda call: here.finish() if call.half == "worker" else None)

    def mark(call: Call) -> None:
        """Move the KV tensors that are registered to the emulated device."""
        caches = call.arg(0, "kv_caches")
        values = caches.values() if isinstance(caches, dict) else [call.arg(0, "kv_cache")]
        for value in values:
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


def install_fault(name: str) -> None:
    """Enter a planted fault of the engine for the rest of this process's life. Idempotent."""
    if name in _faults:
        return
    _faults.add(name)
    fault: Fault = resolve_name(name)
    _open.enter_context(fault.active())


def _keep(runner: Any) -> None:
    """Restore the emulation's torch.accelerator after a model runner was made.

    The constructor of the CPU's model runner replaces functions there with ones that do nothing.
    """
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


def surroundings() -> None:
    """Load our plugin, which puts probe, adapters and device into this process.

    To be called before vLLM is configured. In processes that vLLM starts, vLLM itself loads it.
    """
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def engine(job: Job) -> Any:
    """Return vLLM's LLM for a job."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    start = job.start
    options: dict[str, Any] = {}
    if start["spec_tokens"]:
        drafter = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2}
        if job.drafter is not None:
            drafter = {"method": "draft_model", "model": job.drafter}
        options["speculative_config"] = {
            **drafter,
            "num_speculative_tokens": start["spec_tokens"],
        }
    if start["priority"]:
        options["scheduling_policy"] = "priority"
    if job.transfer is not None:
        options["kv_transfer_config"] = KVTransferConfig(**job.transfer)
    assert bool(int(os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"])) is start["processes"]
    return LLM(
        model=job.model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=dtype(),
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
        **memory(),
        **options,
    )
