# SPDX-License-Identifier: Apache-2.0
"""vLLM, as the code of its offloading connectors finds it where there is a GPU: platform, copy operations, pinned memory."""

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
"""Those that have, or have imported by name, something that is exchanged. Each release has some of them."""


class CudaRuntime:
    """What vLLM's `CudaRTLibrary` (libcudart through ctypes) is used for by those who pin memory: results are plain integers."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int = 0) -> int:
        """Pin a range of host memory; 0 is success."""
        return int(torch.cuda.cudart().cudaHostRegister(pointer, size, flags))  # type: ignore[attr-defined]

    def cudaHostUnregister(self, pointer: int) -> int:
        """Undo it; 0 is success."""
        return int(torch.cuda.cudart().cudaHostUnregister(pointer))  # type: ignore[attr-defined]

    def cudaGetLastError(self) -> int:
        """No call leaves an error behind."""
        return 0


@contextmanager
def vllm_on_cuda(cuda: Emulation) -> Iterator[None]:
    """Exchange, for this process, what vLLM's modules took from a machine without a GPU. `cuda` is in force. Restores all on exit."""
    copies = Copies(cuda)
    with platform_is_cuda():
        patches = Patches()
        try:
            for module in _installed():
                for name, value in _exchanged(module, copies).items():
                    patches.set(module, name, value)
                worker = getattr(module, "OffloadingConnectorWorker", None)
                if worker is not None and "block_stride" not in KVCacheTensor.__dataclass_fields__:
                    patches.set(worker, "register_kv_caches", _refuse_offloading)
            yield
        finally:
            patches.restore()


def _installed() -> Iterator[Any]:
    for name in MODULES:
        try:
            yield importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if not name.startswith(f"{missing.name}"):
                raise


def _exchanged(module: Any, copies: Copies) -> dict[str, Any]:
    """The names that `module` has itself, with what they stand for now."""
    known: dict[str, Any] = {
        "PIN_MEMORY": True,
        "HAS_TRITON": False,  # its copies would be kernels that read host memory
        "is_pin_memory_available": lambda: True,
        "swap_blocks_batch": copies.swap_blocks_batch,
        "swap_blocks": copies.swap_blocks,
        "CudaRTLibrary": CudaRuntime,
        "_resolve_batch_memcpy": lambda: (
            copies.batch_memcpy,
            1,
        ),  # with the number of attributes that it takes
        "_batch_memcpy": None,
    }
    if "_batch_memcpy_fn" in vars(module):  # until 0.28
        known["_resolve_batch_memcpy"] = _refuse
    return {name: value for name, value in known.items() if name in vars(module)}


def _refuse() -> None:
    raise NotEmulated(
        "layers in allocations of their own, as SimpleCPUOffloadConnector wants them before vLLM 0.29"
    )


def _refuse_offloading(*args: Any) -> None:
    raise NotEmulated(
        "attention layers with allocations of their own, as OffloadingConnector wants them before vLLM 0.26"
    )
