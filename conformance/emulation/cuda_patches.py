# SPDX-License-Identifier: Apache-2.0
"""Replacements for torch.cuda, its cudart, torch.accelerator, torch.Stream and torch.Event."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch

from kvconform.emulation.context import STATE, Emulation, active
from kvconform.emulation.machine import Queue
from kvconform.emulation.note import NotEmulated
from kvconform.emulation.patch import Patches
from kvconform.emulation.placement import wants_cuda
from kvconform.emulation.stream import (
    Event,
    ExternalStream,
    GenericEvent,
    GenericStream,
    Stream,
    StreamContext,
)


class Result(IntEnum):
    """Result of a runtime call."""

    success = 0
    invalid_value = 1
    not_registered = 713


class CudaRuntime:
    """Stand-in for the module that torch.cuda.cudart() returns."""

    cudaError = Result

    @property
    def _emulation(self) -> Emulation:
        return active()

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int = 0) -> Result:
        """Pin [pointer, pointer + nbytes)."""
        with self._emulation.raw():
            self._emulation.memory.register(pointer, nbytes)
        return Result.success

    def cudaHostUnregister(self, pointer: int) -> Result:
        """Undo cudaHostRegister; as in CUDA, only for the address that was registered."""
        return (
            Result.success if self._emulation.memory.unregister(pointer) else Result.not_registered
        )

    def cudaMemcpyAsync(
        self, dst: int, src: int, nbytes: int, kind: int = 4, stream: int = 0
    ) -> Result:
        """Queue a copy by address on the stream with this handle."""
        self._emulation.queue_copy(dst, src, nbytes, ExternalStream(stream), what="cudaMemcpyAsync")
        return Result.success

    def cudaMemGetInfo(self, device: int = 0) -> tuple[int, int]:
        """Return free and total bytes of the device; both are made up."""
        return 64 << 30, 80 << 30

    def cudaGetLastError(self) -> Result:
        """Return success: no call leaves an error behind."""
        return Result.success

    def cudaDeviceSynchronize(self) -> Result:
        """Wait, as the host, for everything on every stream."""
        self._emulation.synchronize_device("cudaDeviceSynchronize")
        return Result.success


MEMORY = (64 << 30, 80 << 30)  # free and total bytes, made up
PROPERTIES = {
    "name": "emulated",
    "major": 9,
    "minor": 0,
    "total_memory": MEMORY[1],
    "multi_processor_count": 132,
    "warp_size": 32,
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 49152,
    "shared_memory_per_multiprocessor": 233472,
    "L2_cache_size": 50 << 20,
    "is_integrated": False,
    "is_multi_gpu_board": False,
    "gcnArchName": "emulated",
    "uuid": "00000000-0000-0000-0000-000000000000",
}
NOTHING = (
    "init",
    "_lazy_init",
    "empty_cache",
    "ipc_collect",
    "set_per_process_memory_fraction",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_sync_debug_mode",
)
ZERO = (
    "memory_allocated",
    "memory_reserved",
    "max_memory_allocated",
    "max_memory_reserved",
    "utilization",
    "get_sync_debug_mode",
)
ABSENT = {
    "CUDAGraph": "CUDA graphs",
    "graph": "CUDA graphs",
    "make_graphed_callables": "CUDA graphs",
    "graph_pool_handle": "CUDA graphs",
    "MemPool": "memory pools (torch.cuda.MemPool)",
    "use_mem_pool": "memory pools (torch.cuda.use_mem_pool)",
    "caching_allocator_alloc": "direct use of the caching allocator",
    "memory_snapshot": "snapshots of the allocator (torch.cuda.memory_snapshot)",
    **{
        f"{verb}_rng_state{all_}": "state of the device's random numbers"
        for verb in ("get", "set")
        for all_ in ("", "_all")
    },
}


def absent(what: str) -> Callable[..., Any]:
    """Return a function that raises NotEmulated for `what` when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotEmulated(what)

    return refuse


def absent_class(what: str) -> type:
    """Return a class that can be named, as in annotations, but not instantiated."""
    return type("Absent", (), {"__new__": absent(what)})


def nothing(*args: Any, **kwargs: Any) -> None:
    """Accept any arguments and do nothing."""


def returning(value: Any) -> Callable[..., Any]:
    """Return a new function that accepts any arguments and returns a value.

    torch.compile keeps a table of torch's functions and refuses one function under two names.
    """
    return lambda *args, **kwargs: value


class OnDevice:
    """torch.cuda.device(...): there is one device, and it is current."""

    def __init__(self, device: Any = None) -> None:
        wants_cuda(0 if device is None else device)
        self.idx = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


class OnDeviceOf(OnDevice):
    """torch.cuda.device_of(...): the device of a tensor."""

    def __init__(self, obj: Any) -> None:
        super().__init__()


def current_stream(device: Any = None) -> Stream:
    """Return the thread's current stream; the same object every time."""
    return stream_of(active().queue)


def stream_of(queue: Queue) -> Stream:
    """Return the torch.cuda.Stream object of a queue of the thread's emulation."""
    streams = active().streams
    return streams.get(queue.handle) or streams.setdefault(queue.handle, Stream(queue=queue))


def patch_cuda(patches: Patches) -> None:
    """Replace torch's functions and classes for the device; `patches` restores them."""

    def set_stream(stream: GenericStream | None) -> None:
        if stream is not None:
            active()  # resets the thread's queue if its emulation is over, so it has to come first
            STATE.queue = stream.queue

    def set_device(device: Any) -> None:
        wants_cuda(device)

    def synchronize(device: Any = None) -> None:
        active().synchronize_device("device synchronize")

    def spin(cycles: int) -> None:
        active().put(active().queue, nothing)

    runtime = CudaRuntime()
    cuda: dict[str, Any] = {
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": lambda device=None: stream_of(active().machine.default),
        "get_stream_from_external": lambda pointer, device=None: ExternalStream(pointer),
        "set_stream": set_stream,
        "synchronize": synchronize,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": set_device,
        "device": OnDevice,
        "device_of": OnDeviceOf,
        "get_device_properties": lambda device=None: SimpleNamespace(**PROPERTIES),
        "get_device_name": lambda device=None: "emulated",
        "get_device_capability": lambda device=None: (9, 0),
        "can_device_access_peer": lambda *devices: False,
        "mem_get_info": lambda device=None: MEMORY,
        "memory_stats": lambda device=None: {},
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "cudart": lambda: runtime,
        "_sleep": spin,
        **{name: returning(None) for name in NOTHING},
        **{name: returning(0) for name in ZERO},
        **{
            name: (absent_class if name[:1].isupper() else absent)(what)
            for name, what in ABSENT.items()
        },
    }
    for name, value in cuda.items():
        patches.set(torch.cuda, name, value)
    for name in ("range_push", "range_pop", "mark"):
        patches.set(torch.cuda.nvtx, name, returning(None))
    accelerator: dict[str, Any] = {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "set_device_index": set_device,
        "set_device_idx": set_device,
        "device_index": OnDevice,
        "current_stream": current_stream,
        "set_stream": set_stream,
        "synchronize": synchronize,
        "empty_cache": returning(None),
        "get_memory_info": lambda device=None: MEMORY,
        "memory_stats": lambda device=None: {},
        "get_device_capability": lambda device=None: {},
        "memory_allocated": returning(0),
        "memory_reserved": returning(0),
        "max_memory_allocated": returning(0),
        "max_memory_reserved": returning(0),
        "reset_peak_memory_stats": returning(None),
        "reset_accumulated_memory_stats": returning(None),
    }
    for name, value in accelerator.items():
        patches.set(torch.accelerator, name, value)
    patches.set(
        torch.UntypedStorage, "_share_cuda_", absent("device memory shared between processes")
    )
    patches.set(torch, "Stream", GenericStream)
    patches.set(torch, "Event", GenericEvent)
    triton = sys.modules.get("triton.runtime.jit")
    if triton is not None:
        refuse = absent(
            "Triton kernels (the interpreter, TRITON_INTERPRET=1, runs them on host tensors)"
        )
        patches.set(triton.JITFunction, "run", refuse)
