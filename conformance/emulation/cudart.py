# SPDX-License-Identifier: Apache-2.0
"""The functions of the CUDA runtime that Python code calls directly: torch.cuda.cudart()."""

from __future__ import annotations

from enum import IntEnum

from .context import Emulation, active
from .stream import ExternalStream


class cudaError(IntEnum):
    """Result of a runtime call."""

    success = 0
    invalid_value = 1
    not_registered = 713


class CudaRuntime:
    """Stands in for the module that torch.cuda.cudart() returns."""

    cudaError = cudaError

    @property
    def _emulation(self) -> Emulation:
        return active()

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int = 0) -> cudaError:
        """Pin [pointer, pointer + nbytes)."""
        with self._emulation.raw():
            self._emulation.memory.register(pointer, nbytes)
        return cudaError.success

    def cudaHostUnregister(self, pointer: int) -> cudaError:
        """Undo cudaHostRegister; as in CUDA only for the address that was registered."""
        return cudaError.success if self._emulation.memory.unregister(pointer) else cudaError.not_registered

    def cudaMemcpyAsync(self, dst: int, src: int, nbytes: int, kind: int = 4, stream: int = 0) -> cudaError:
        """A copy by address on the stream that has this handle."""
        self._emulation.queue_copy(dst, src, nbytes, ExternalStream(stream), what="cudaMemcpyAsync")
        return cudaError.success

    def cudaMemGetInfo(self, device: int = 0) -> tuple[int, int]:
        """Free and total bytes of the device; made up."""
        return 64 << 30, 80 << 30

    def cudaGetLastError(self) -> cudaError:
        return cudaError.success

    def cudaDeviceSynchronize(self) -> cudaError:
        self._emulation.synchronize_device("cudaDeviceSynchronize")
        return cudaError.success
