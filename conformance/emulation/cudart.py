# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.cudart(): the functions of the CUDA runtime that Python code calls directly."""

from __future__ import annotations

from enum import IntEnum

from kvconform.emulation.context import Emulation, active
from kvconform.emulation.stream import ExternalStream


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
