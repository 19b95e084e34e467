# SPDX-License-Identifier: Apache-2.0
"""vLLM as on a machine with a GPU, for connectors: platform, copy operations, pinned memory.

vLLM's copies between device and host become work of an emulated stream.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheTensor

from kvconform.emulation.context import Emulation
from kvconform.emulation.note import NotEmulated
from kvconform.emulation.patch import Patches
from kvconform.emulation.shared_files import Files, Mappings
from kvconform.emulation.vllm_platform import EMULATED, platform_is_cuda

# Values of the driver's CUmemcpySrcAccessOrder.
SOURCE_IN_STREAM_ORDER = 1
SOURCE_ANY = 3
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE


class Copies:
    """The copy operations. Each queues one piece of work, on the current stream or the given one.

    They raise ValueError and NotEmulated as `Emulation.queue_copy` does.
    """

    def __init__(self, cuda: Emulation) -> None:
        self.cuda = cuda

    def swap_blocks_batch(
        self,
        src_ptrs: torch.Tensor,
        dst_ptrs: torch.Tensor,
        sizes: torch.Tensor,
        is_src_access_order_any: bool = False,
    ) -> None:
        """Replace `vllm._custom_ops.swap_blocks_batch`.

        src_ptrs, dst_ptrs and sizes are [copies], int64, in host memory; RuntimeError for others.
        """
        for name, tensor in {"src_ptrs": src_ptrs, "dst_ptrs": dst_ptrs, "sizes": sizes}.items():
            if (
                tensor.is_cuda
                or tensor.dtype != torch.int64
                or tensor.dim() != 1
                or len(tensor) != len(src_ptrs)
            ):
                raise RuntimeError(
                    f"swap_blocks_batch: {name} must be an int64 tensor [copies] in host memory, "
                    "as long as the others"
                )
        self.cuda.queue_copy(
            dst_ptrs.tolist(),
            src_ptrs.tolist(),
            sizes.tolist(),
            any_order=is_src_access_order_any,
            what="swap_blocks_batch",
        )

    def swap_blocks(self, src: torch.Tensor, dst: torch.Tensor, *rest: Any) -> None:
        """Replace `vllm._custom_ops.swap_blocks`.

        The last argument is block_mapping, [copies, 2], int64, in host memory. Since vLLM 0.18 the
        size of a block in bytes precedes it; until then it is the size of a row of `src`.
        """
        if not (src.is_cuda or dst.is_cuda):
            raise RuntimeError("swap_blocks: src and dst must not both be in host memory")
        if rest[-1].is_cuda:
            raise RuntimeError("swap_blocks: block_mapping must be in host memory")
        size = rest[0] if len(rest) == 2 else src.element_size() * src.stride(0)
        source_start = src.data_ptr()
        target_start = dst.data_ptr()
        pairs = rest[-1].tolist()
        sources = [source_start + source * size for source, _ in pairs]
        targets = [target_start + target * size for _, target in pairs]
        self.cuda.queue_copy(targets, sources, [size] * len(pairs), what="swap_blocks")

    def batch_memcpy(
        self,
        dsts: int,
        srcs: int,
        sizes: int,
        count: int,
        attrs: int,
        attr_indices: Any,
        num_attrs: int,
        fail_index: Any,
        stream: int,
    ) -> int:
        """Replace the driver's cuMemcpyBatchAsync and return a CUresult.

        `dsts`, `srcs` and `sizes` are addresses of arrays [count], which are read at the call.
        """
        if count <= 0 or num_attrs != 1 or not stream:
            return INVALID_VALUE  # the driver rejects an empty batch and the default stream
        order = ctypes.c_uint.from_address(attrs).value
        if order not in (SOURCE_IN_STREAM_ORDER, SOURCE_ANY):
            raise NotEmulated(f"cuMemcpyBatchAsync with srcAccessOrder {order}")
        self.cuda.queue_copy(
            _numbers(dsts, count),
            _numbers(srcs, count),
            _numbers(sizes, count),
            torch.cuda.ExternalStream(stream),
            any_order=order == SOURCE_ANY,
            what="cuMemcpyBatchAsync",
        )
        return 0


def _numbers(address: int, count: int) -> list[int]:
    """Return the numbers of an array of size_t."""
    return list((ctypes.c_uint64 * count).from_address(address))


REGION = "vllm.v1.kv_offload.cpu.shared_offload_region"
MODULES = (
    "vllm._custom_ops",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.utils.platform_utils",
    "vllm.v1.kv_offload.cpu.gpu_worker",
    "vllm.v1.kv_offload.cpu.host_register",
    REGION,
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
    with platform_is_cuda(*EMULATED):
        patches = Patches()
        files = Files()
        mappings = Mappings(lambda start, end: cuda.memory.guards.append((start, end)))
        try:
            for module in _installed():
                for name, value in _replacements(module, copies).items():
                    patches.set(module, name, value)
                if module.__name__ == REGION:
                    patches.set(module, "os", files)
                    patches.set(module, "mmap", mappings)
                worker = getattr(module, "OffloadingConnectorWorker", None)
                if worker is not None and "block_stride" not in KVCacheTensor.__dataclass_fields__:
                    patches.set(worker, "register_kv_caches", _refuse_offloading)
            yield
        finally:
            patches.restore()
            files.restore()
            mappings.restore()


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
