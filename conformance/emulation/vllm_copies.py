# SPDX-License-Identifier: Apache-2.0
"""vLLM's copy operations between device and host, as work of an emulated stream. They get raw addresses, or whole tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

SOURCE_ANY = 3
"""CUmemcpySrcAccessOrder: the source may be read before the copy's turn has come. 1 is STREAM, 2 DURING_API_CALL."""
SOURCE_AT_CALL = 2
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE

Parts = Sequence[tuple[int, int, int]]
"""Destination address, source address and number of bytes of each copy."""


class Copies:
    """The operations, each queued on the current stream or the given one. None runs anything itself.

    `eager`: whether a source that may be read at any time is read when the call is made, instead of when the copy's turn comes: both are
    legal.
    """

    def __init__(self, cuda: Any, *, eager: bool) -> None:
        self.cuda, self.eager = cuda, eager

    def swap_blocks_batch(
        self, src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
    ) -> None:
        """`vllm._custom_ops.swap_blocks_batch`: src_ptrs, dst_ptrs, sizes [copies] int64, in host memory. RuntimeError for others."""
        given = {"src_ptrs": src_ptrs, "dst_ptrs": dst_ptrs, "sizes": sizes}
        for name, tensor in given.items():
            if tensor.is_cuda or tensor.dtype != torch.int64 or tensor.dim() != 1 or len(tensor) != len(src_ptrs):
                raise RuntimeError(
                    f"swap_blocks_batch: {name} must be a one-dimensional int64 tensor in host memory, of the others' length"
                )
        with self.cuda.raw():
            parts = list(zip(dst_ptrs.tolist(), src_ptrs.tolist(), sizes.tolist(), strict=True))
        self.queue(parts, early=is_src_access_order_any and self.eager, what="swap_blocks_batch")

    def swap_blocks(self, src: torch.Tensor, dst: torch.Tensor, *rest: Any) -> None:
        """`vllm._custom_ops.swap_blocks`: block_mapping [copies, 2] int64 in host memory, after the bytes of a block (until 0.17 they are
        those of a row of `src`)."""
        if not (src.is_cuda or dst.is_cuda):
            raise RuntimeError("swap_blocks: src and dst must not both be in host memory")
        if rest[-1].is_cuda:
            raise RuntimeError("swap_blocks: block_mapping must be in host memory")
        with self.cuda.raw():
            size = rest[0] if len(rest) == 2 else src.element_size() * src.stride(0)
            at, to = src.data_ptr(), dst.data_ptr()
            parts = [(to + target * size, at + source * size, size) for source, target in rest[-1].tolist()]
        self.queue(parts, early=False, what="swap_blocks")

    def batch_memcpy(
        self, dsts: int, srcs: int, sizes: int, count: int, attrs: int, attr_indices: Any, num_attrs: int, fail_index: Any, stream: int
    ) -> int:
        """The driver's cuMemcpyBatchAsync: arrays [count] of addresses and sizes, read when the call is made. Returns a CUresult."""
        if count <= 0 or num_attrs != 1 or not stream:
            return INVALID_VALUE  # the driver takes neither nothing to copy nor the default stream
        order = ctypes.c_uint.from_address(attrs).value
        lists = [np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address)).tolist() for address in (dsts, srcs, sizes)]
        early = order == SOURCE_AT_CALL or (order == SOURCE_ANY and self.eager)
        self.queue(list(zip(*lists, strict=True)), early=early, what="cuMemcpyBatchAsync", stream=stream)
        return 0

    def queue(self, parts: Parts, *, early: bool, what: str, stream: int | None = None) -> None:
        """Queue copies, which run one after the other. `early`: all sources are read now; those in pageable memory are in any case."""
        read = [
            ctypes.string_at(source, size) if early or self.cuda.memory_class(source, size) == "pageable" else source
            for _, source, size in parts
        ]
        self.cuda.enqueue(lambda: _copy(parts, read), stream, what=what)


def _copy(parts: Parts, read: Sequence[int | bytes]) -> None:
    for (target, _, size), source in zip(parts, read, strict=True):
        ctypes.memmove(target, source, size)
