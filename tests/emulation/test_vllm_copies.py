# SPDX-License-Identifier: Apache-2.0
"""Tests of vLLM's copy operations on an emulated device: which bytes go where, and when."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from kvconform.emulation.emulate import emulate
from kvconform.emulation.note import NotEmulated
from kvconform.emulation.vllm_on_cuda import (
    INVALID_VALUE,
    SOURCE_ANY,
    SOURCE_IN_STREAM_ORDER,
    Copies,
)

BLOCKS, SIZE = 6, 8  # of bytes


def memory(cuda: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks on the device that hold their own numbers, and pinned blocks of zeros."""
    kv = cuda.to_device(
        torch.arange(BLOCKS, dtype=torch.uint8).repeat_interleave(SIZE).view(BLOCKS, SIZE).clone()
    )
    return kv, torch.zeros(BLOCKS, SIZE, dtype=torch.uint8, pin_memory=True)


def first_bytes(cuda: Any, tensor: torch.Tensor) -> list[int]:
    with cuda.raw():
        return [int(number) for number in tensor[:, 0]]


def addresses(tensor: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() + block * SIZE for block in blocks], dtype=torch.int64)


def batch(
    copies: Copies,
    dst: torch.Tensor,
    to: list[int],
    src: torch.Tensor,
    of: list[int],
    stream: int,
    order: int,
) -> int:
    """Call cuMemcpyBatchAsync as C code would."""
    dsts, srcs = (
        addresses(dst, to).numpy().view(np.uint64),
        addresses(src, of).numpy().view(np.uint64),
    )
    sizes = np.full(len(to), SIZE, dtype=np.uint64)
    attributes = (ctypes.c_uint * 6)(order)
    pointers = dsts.ctypes.data, srcs.ctypes.data, sizes.ctypes.data
    index, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    return copies.batch_memcpy(
        *pointers,
        len(to),
        ctypes.addressof(attributes),
        ctypes.byref(index),
        1,
        ctypes.byref(failed),
        stream,
    )


def test_a_batch_of_blocks_is_copied_in_stream_order() -> None:
    with emulate("transfers") as cuda:
        (kv, host), side = memory(cuda), torch.cuda.Stream()
        with torch.cuda.stream(side):
            Copies(cuda).swap_blocks_batch(
                addresses(kv, [3, 1]), addresses(host, [0, 5]), torch.tensor([SIZE, SIZE])
            )
        assert first_bytes(cuda, host) == [0] * 6
        side.synchronize()
        assert first_bytes(cuda, host) == [3, 0, 0, 0, 0, 1]


def test_blocks_are_copied_by_a_mapping_with_and_without_their_size() -> None:
    with emulate("compute") as cuda:
        kv, host = memory(cuda)
        side, pairs = torch.cuda.Stream(), torch.tensor([[2, 0], [5, 1]], dtype=torch.int64)
        with torch.cuda.stream(side):
            Copies(cuda).swap_blocks(kv, host, SIZE, pairs)
            Copies(cuda).swap_blocks(kv, host[2:], pairs)
        assert first_bytes(cuda, host) == [2, 5, 2, 5, 0, 0]


@pytest.mark.parametrize("order", [SOURCE_IN_STREAM_ORDER, SOURCE_ANY])
def test_the_source_of_a_batch_may_be_read_before_its_turn_if_that_was_allowed(order: int) -> None:
    with emulate("compute") as cuda:
        (kv, host), side = memory(cuda), torch.cuda.Stream()
        host[0] = 9
        cuda.launch(lambda: None)
        side.wait_stream(torch.cuda.current_stream())  # the copy's turn has not come
        assert batch(Copies(cuda), kv, [4], host, [0], side.cuda_stream, order) == 0
        host[0] = 8
        cuda.drain()
        assert first_bytes(cuda, kv)[4] == (9 if order == SOURCE_ANY else 8)


def test_what_the_driver_refuses() -> None:
    with emulate("compute") as cuda:
        (kv, host), side = memory(cuda), torch.cuda.Stream()
        # the default stream
        assert batch(Copies(cuda), host, [0], kv, [1], 0, SOURCE_ANY) == INVALID_VALUE
        assert batch(Copies(cuda), host, [], kv, [], side.cuda_stream, SOURCE_ANY) == INVALID_VALUE
        with pytest.raises(NotEmulated):
            batch(Copies(cuda), host, [0], kv, [1], side.cuda_stream, 7)
        with pytest.raises(ValueError, match="no device, pinned or known host memory"):
            batch(Copies(cuda), host, [0], kv, [BLOCKS], side.cuda_stream, SOURCE_ANY)
        assert first_bytes(cuda, host) == [0] * 6


def test_lists_have_to_be_in_host_memory() -> None:
    with emulate("compute") as cuda:
        kv, host = memory(cuda)
        lists = addresses(kv, [1]), addresses(host, [1]), torch.tensor([SIZE])
        with pytest.raises(RuntimeError, match="sizes must be an int64 tensor"):
            Copies(cuda).swap_blocks_batch(lists[0], lists[1], lists[2].to(torch.int32))
        with pytest.raises(RuntimeError, match="src_ptrs must be"):
            Copies(cuda).swap_blocks_batch(lists[0].cuda(), lists[1], lists[2])
        with pytest.raises(RuntimeError, match="both be in host memory"):
            Copies(cuda).swap_blocks(host, host.clone(), SIZE, torch.zeros(1, 2, dtype=torch.int64))
