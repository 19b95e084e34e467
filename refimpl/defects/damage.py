# SPDX-License-Identifier: Apache-2.0
"""Planted defects: stores that trust what they find on disk, or that a disk has room."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from kvconform.refimpl.cache.backend import Backend
from kvconform.refimpl.cache.chunks import ChunkStore
from kvconform.refimpl.cache.file import FileBackend
from kvconform.refimpl.cache.seal import HEADER, packed, unpacked
from kvconform.refimpl.cache.urls import open_backend
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.plan import Save


class _Trusting(ChunkStore):
    """Knows what it wrote: the start of each file, up to the numbers, and the length of the rest.

    One rank only.
    """

    known: ClassVar[dict[str, tuple[bytes, int]]] = {}

    def _sealed(self, name: str, layers: Mapping[str, bytes]) -> bytes:
        stored = super()._sealed(name, layers)
        length = sum(map(len, layers.values()))
        self.known[name] = stored[: len(stored) - length], length
        return stored

    def _opened(self, name: str, stored: bytes | None) -> dict[str, bytes]:
        start, length = self.known.get(name, (b"", 0))
        data = None if stored is None else stored[len(start) :]
        trusted = self._trusted(data, length)
        if trusted is None:
            return super()._opened(name, stored)
        return unpacked(start[HEADER.size + len(name) :] + trusted)

    def _trusted(self, data: bytes | None, length: int) -> bytes | None:
        """Return what is taken for the numbers; None: verify the file. `data` None: no file."""
        raise NotImplementedError


class _ZerosForMissing(_Trusting):
    def _is_complete(self, epoch: int, key: str) -> bool:
        return self._name(epoch, key, 0) in self.known

    def _trusted(self, data: bytes | None, length: int) -> bytes | None:
        return bytes(length) if data is None else None


class _Pads(_Trusting):
    def _trusted(self, data: bytes | None, length: int) -> bytes | None:
        short = data is not None and len(data) < length
        return (data or b"").ljust(length, b"\0") if short else None


class _ReadsTheEnd(_Trusting):
    def _trusted(self, data: bytes | None, length: int) -> bytes | None:
        return data[-length:] if data is not None and len(data) > length else None


class _Unverified(_Trusting):
    def _trusted(self, data: bytes | None, length: int) -> bytes | None:
        return data if data is not None and len(data) == length else None


class _OverFiles(ReferenceConnector):
    """Has a store of this kind, one rank only."""

    kind: ClassVar[type[ChunkStore]]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._store = self.kind(self._backend())

    def _backend(self) -> Backend:
        return open_backend(self.options.store)


class ZerosForMissing(_OverFiles):
    """Keeps an index in memory, and takes a file that is gone for one full of zeros."""

    kind = _ZerosForMissing


class PadsShortFiles(_OverFiles):
    """Fills up what a read of too few bytes leaves out, with zeros."""

    kind = _Pads


class ReadsTheEnd(_OverFiles):
    """Reads as many bytes as it wrote from the end of the file, wherever its data begin."""

    kind = _ReadsTheEnd


class Unverified(_OverFiles):
    """Compares the length of what it reads, and not its content."""

    kind = _Unverified


class _InPlace(FileBackend):
    """Writes a file under its name, and leaves what it has written when the disk is full."""

    def _write(self, path: str, value: bytes) -> None:
        self._make(os.path.dirname(path))
        with suppress(OSError), open(path, "wb") as file:
            file.write(value)


class _Bare(ChunkStore):
    """Stores layers in safetensors' format as they are, without a checksum."""

    def _sealed(self, name: str, layers: Mapping[str, bytes]) -> bytes:
        return packed(layers)

    def _opened(self, name: str, stored: bytes | None) -> dict[str, bytes]:
        return {} if stored is None else unpacked(stored)


class _Reserves(FileBackend):
    """Writes the head of a file under its name, and reserves the room for the rest first."""

    def _write(self, path: str, value: bytes) -> None:
        self._make(os.path.dirname(path))
        head = 8 + int.from_bytes(value[:8], "little")
        with open(path, "wb") as file:
            file.write(value[:head])
            file.truncate(len(value))
            file.flush()
            file.write(value[head:])


class HalfWritten(_OverFiles):
    """Takes a file for whole that has its length, although its writer may have been killed."""

    kind = _Bare

    def _backend(self) -> Backend:
        return _Reserves(self.options.store)


class TornFiles(_OverFiles):
    """Takes a file for whole although the disk got full while it was written, and fills it up."""

    kind = _Pads

    def _backend(self) -> Backend:
        return _InPlace(self.options.store)


class ForgetsLostSaves(ReferenceConnector):
    """Never reports the end of a request of which a save has failed. Use with `async_saves`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._broken: set[str] = set()

    def _save(self, epoch: int, save: Save, layers: Iterable[str]) -> None:
        lost = self._store.lost
        super()._save(epoch, save, layers)
        if self._store.lost > lost:
            self._broken.add(save.req)
        self._sent -= self._broken
