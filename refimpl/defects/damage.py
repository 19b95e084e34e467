# SPDX-License-Identifier: Apache-2.0
"""Planted defects: stores that trust what they find on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.store import CHECKSUM, DirectoryStore


class _Trusting(DirectoryStore):
    """Knows what it wrote: the length of the data by file, and the chunks that are complete."""

    lengths: ClassVar[dict[str, int]] = {}
    complete: ClassVar[set[str]] = set()

    def _keep(self, epoch: int, path: str, data: bytes) -> None:
        super()._keep(epoch, path, data)
        self.lengths[path] = len(data) - CHECKSUM.size
        if path.endswith(".complete"):
            self.complete.add(path.rpartition("/")[0])

    def _verified(self, path: Path) -> bytes | None:
        data = path.read_bytes()[CHECKSUM.size :] if path.exists() else None
        trusted = self._trusted(data, self.lengths.get(str(path), 0))
        return super()._verified(path) if trusted is None else trusted

    def _trusted(self, data: bytes | None, length: int) -> bytes | None:
        """Return what is taken for the data, or None to verify it. `data` None: no file."""
        raise NotImplementedError


class _ZerosForMissing(_Trusting):
    def has(self, key: str) -> bool:
        return self._chunk(self.epoch(), key) in self.complete

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

    kind: ClassVar[type[_Trusting]]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._store = self.kind(Path(self.options.store))


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
