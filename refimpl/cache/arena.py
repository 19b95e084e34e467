# SPDX-License-Identifier: Apache-2.0
"""Values in one piece of memory of a fixed size: on the CUDA device, or pinned on the host.

A value is bytes, so each one comes from the host and goes back to it. Copies to and from the device
are queued on a stream of the arena's own. Storing does not wait for its copy. Reading does: until
the copy has ended, the host's buffer holds something else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch

from kvconform.refimpl.cache.backend import Full, StoreError


class PinnedBackend:
    """Values in `size` bytes of pinned memory, which no other back end shares.

    The memory is allocated when the first value comes. It counts no entries: a value without a gap
    that is large enough is refused with Full, and one that is larger than all the memory with
    StoreError.
    """

    scheme = "pinned"

    def __init__(self, size: int) -> None:
        if not torch.cuda.is_available():
            raise ValueError(
                f"a store at {self.scheme}: needs a CUDA device; --emulate-cuda emulates one"
            )
        self.size = size
        self._memory: torch.Tensor | None = None
        # Start and length of each value.
        self._spans: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """The bytes of all values."""
        with self._lock:
            return sum(length for _, length in self._spans.values())

    def _allocate(self) -> torch.Tensor:
        return torch.empty(self.size, dtype=torch.uint8, pin_memory=True)

    def exists(self, key: str) -> bool:
        return key in self._spans

    def get(self, key: str) -> bytes | None:
        with self._lock:
            if key not in self._spans:
                return None
            return self._read(self._part(*self._spans[key]))

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            span = (self._gap(len(value), besides=key), len(value))
            if value:
                self._write(
                    self._part(*span), torch.frombuffer(bytearray(value), dtype=torch.uint8)
                )
            self._spans[key] = span

    def list(self, prefix: str = "") -> Iterator[str]:
        return iter([key for key in list(self._spans) if key.startswith(prefix)])

    def delete(self, key: str) -> None:
        with self._lock:
            self._spans.pop(key, None)

    def close(self) -> None:
        """Keep the values."""

    def _gap(self, length: int, besides: str) -> int:
        """Return the start of the first gap of this length, as if `besides` had no value."""
        if length > self.size:
            raise StoreError(f"the {self.scheme} memory is too small for {length} bytes")
        start = 0
        others = (span for key, span in self._spans.items() if key != besides)
        for taken, taken_length in sorted(others):
            if taken - start >= length:
                return start
            start = taken + taken_length
        if self.size - start < length:
            raise Full(f"the {self.scheme} memory has no room for {length} bytes")
        return start

    def _part(self, start: int, length: int) -> torch.Tensor:
        if self._memory is None:
            self._memory = self._allocate()
        return self._memory[start : start + length]

    def _write(self, part: torch.Tensor, value: torch.Tensor) -> None:
        part.copy_(value)

    def _read(self, part: torch.Tensor) -> bytes:
        return part.numpy().tobytes()


class DeviceBackend(PinnedBackend):
    """Values in `size` bytes of device memory.

    One stream has all copies, so a value is read after it was written, and its memory is written
    again after it was read.
    """

    scheme = "device"
    _stream: torch.cuda.Stream

    def _allocate(self) -> torch.Tensor:
        self._stream = torch.cuda.Stream()
        memory = torch.empty(self.size, dtype=torch.uint8, device="cuda")
        # The memory may have had another user, whose work is queued on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        return memory

    def _write(self, part: torch.Tensor, value: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            part.copy_(value.pin_memory(), non_blocking=True)

    def _read(self, part: torch.Tensor) -> bytes:
        host = torch.empty(len(part), dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(part, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._await(copied)
        return host.numpy().tobytes()

    def _await(self, copied: torch.cuda.Event) -> None:
        """Wait until the host's buffer is filled."""
        copied.synchronize()


ARENAS: dict[str, Callable[[int], PinnedBackend]] = {
    "pinned": PinnedBackend,
    "device": DeviceBackend,
}
"""Back ends in a piece of memory, by the scheme of their URLs."""
