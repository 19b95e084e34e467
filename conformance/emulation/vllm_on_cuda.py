# SPDX-License-Identifier: Apache-2.0
"""vLLM as on a machine with a GPU, for connectors: platform, copy operations, pinned memory."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheTensor

from kvconform.emulation.context import Emulation
from kvconform.emulation.errors import NotEmulated
from kvconform.emulation.patch import Patches
from kvconform.emulation.vllm_copies import Copies
from kvconform.emulation.vllm_platform import platform_is_cuda

MODULES = (
    "vllm._custom_ops",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.utils.platform_utils",
    "vllm.v1.kv_offload.cpu.gpu_worker",
    "vllm.v1.kv_offload.cpu.host_register",
    "vllm.v1.kv_offload.worker.cpu_gpu",
    "vllm.v1.simple_kv_offload.copy_backend",
    "vllm.v1.simple_kv_offload.cuda_mem_ops",
    "vllm.v1.simple_kv_offload.disk_backend",
    "vllm.v1.simple_kv_offload.worker",
)
"""Modules that define, or import by name, something that is replaced. Each release has some."""


class CudaRuntime:
    """Stand-in for vLLM's `CudaRTLibrary` (libcudart through ctypes), used to pin memory.

    Results are plain integers.
    """

    def cudaHostRegister(self, pointer: int, size: int, flags: int = 0) -> int:
        """Pin a range of host memory; 0 is success."""
        return int(torch.cuda.cudart().cudaHostRegister(pointer, size, flags))  # type: ignore[attr-defined]

    def cudaHostUnregister(self, pointer: int) -> int:
        """Undo cudaHostRegister; 0 is success."""
        return int(torch.cuda.cudart().cudaHostUnregister(pointer))  # type: ignore[attr-defined]

    def cudaGetLastError(self) -> int:
        """Return 0: no call leaves an error behind."""
        return 0


@contextmanager
def vllm_on_cuda(cuda: Emulation) -> Iterator[None]:
    """Replace what vLLM's modules found on a machine without a GPU, in this process.

    `cuda` must be active. Restores everything at the end.
    """
    copies = Copies(cuda)
    with platform_is_cuda():
        patches = Patches()
        try:
            for module in _installed():
                for name, value in _replacements(module, copies).items():
                    patches.set(module, name, value)
                worker = getattr(module, "OffloadingConnectorWorker", None)
                if worker is not None and "block_stride" not in KVCacheTensor.__dataclass_fields__:
                    patches.set(worker, "register_kv_caches", _refuse_offloading)
            yield
        finally:
            patches.restore()


def _installed() -> Iterator[Any]:
    """Yield the modules that this release of vLLM has."""
    for name in MODULES:
        try:
            yield importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if not name.startswith(f"{missing.name}"):
                raise


def _replacements(module: Any, copies: Copies) -> dict[str, Any]:
    """Return new values for the names that `module` itself has."""
    known: dict[str, Any] = {
        "PIN_MEMORY": True,
        "HAS_TRITON": False,  # its copies would be kernels that read host memory
        "is_pin_memory_available": lambda: True,
        "swap_blocks_batch": copies.swap_blocks_batch,
        "swap_blocks": copies.swap_blocks,
        "CudaRTLibrary": CudaRuntime,
        # The function, and the number of attributes that it takes.
        "_resolve_batch_memcpy": lambda: (copies.batch_memcpy, 1),
        "_batch_memcpy": None,
    }
    if "_batch_memcpy_fn" in vars(module):  # until 0.28
        known["_resolve_batch_memcpy"] = _refuse
    return {name: value for name, value in known.items() if name in vars(module)}


def _refuse() -> None:
    raise NotEmulated(
        "separate allocation for each layer, which SimpleCPUOffloadConnector needs before vLLM 0.29"
    )


def _refuse_offloading(*args: Any) -> None:
    raise NotEmulated(
        "separate allocation for each attention layer, "
        "which OffloadingConnector needs before vLLM 0.26"
    )
