# SPDX-License-Identifier: Apache-2.0
"""vLLM's copy operations between device and host, as work of an emulated stream."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kvconform.emulation.context import Emulation
from kvconform.emulation.errors import NotEmulated

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
