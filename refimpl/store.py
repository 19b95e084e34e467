# SPDX-License-Identifier: Apache-2.0
"""Stores of chunks: in memory, within one process, or in a directory, across processes.

A chunk is stored layer by layer. It is present only when every rank has committed its shard, so a
reader never sees an incomplete chunk. `reset` starts a new epoch: writes that are still under way
belong to the old epoch and never become visible.
"""

from __future__ import annotations

import os
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol
from urllib.parse import quote


class Store(Protocol):
    """A store as one rank sees it: chunks by key, of each the layers of this rank's shard."""

    def epoch(self) -> int:
        """Return the current epoch: how often the store was emptied."""

    def reset(self) -> None:
        """Forget every chunk, including those that are not committed yet."""

    def put(self, epoch: int, key: str, layer: str, data: bytes) -> None:
        """Store one layer of a chunk; it is invisible until `commit`."""

    def commit(self, epoch: int, key: str) -> None:
        """Mark this rank's shard as complete; the chunk is visible when all ranks have done so."""

    def has(self, key: str) -> bool:
        """Return whether the whole chunk can be read now."""

    def get(self, key: str, layer: str) -> bytes | None:
        """Return one layer of this rank's shard; None if it is gone."""

    def drop(self, key: str) -> None:
        """Forget one chunk, if it is present."""

    def keys(self) -> Iterator[str]:
        """Return the keys of the committed chunks."""


class MemoryStore:
    """Chunks in dictionaries that all stores of the same name share.

    So the halves and the ranks of a connector find each other within one process.
    """

    _named: ClassVar[dict[str, _Shelf]] = {}

    def __init__(self, name: str, rank: int = 0, world: int = 1) -> None:
        self._shelf = self._named.setdefault(name, _Shelf())
        self._rank = rank
        self._ranks = set(range(world))

    def epoch(self) -> int:
        return self._shelf.epoch

    def reset(self) -> None:
        self._shelf.epoch += 1
        self._shelf.data = {}
        self._shelf.committed = {}

    def put(self, epoch: int, key: str, layer: str, data: bytes) -> None:
        if epoch == self._shelf.epoch:
            self._shelf.data[key, self._rank, layer] = data

    def commit(self, epoch: int, key: str) -> None:
        if epoch == self._shelf.epoch:
            self._shelf.committed.setdefault(key, set()).add(self._rank)

    def has(self, key: str) -> bool:
        return self._shelf.committed.get(key) == self._ranks

    def get(self, key: str, layer: str) -> bytes | None:
        return self._shelf.data.get((key, self._rank, layer)) if self.has(key) else None

    def drop(self, key: str) -> None:
        self._shelf.committed.pop(key, None)
        self._shelf.data = {
            where: data for where, data in self._shelf.data.items() if where[0] != key
        }

    def keys(self) -> Iterator[str]:
        return iter(sorted(filter(self.has, self._shelf.committed)))


@dataclass
class _Shelf:
    """The contents of a memory store: data by (chunk, rank, layer), committed ranks by chunk."""

    epoch: int = 0
    data: dict[tuple[str, int, str], bytes] = field(default_factory=dict)
    committed: dict[str, set[int]] = field(default_factory=dict)


CHECKSUM = struct.Struct("<I")
"""CRC-32 of the data, at the beginning of a file."""


class DirectoryStore:
    """One file per chunk, rank and layer: `<root>/<epoch>/<key>/<rank>.<layer>.kv`.

    A file `<rank>.complete` commits the rank's shard. Data begin with their checksum, because files
    may be cut short or overwritten; what does not fit its checksum is gone.
    """

    def __init__(self, root: Path, rank: int = 0, world: int = 1) -> None:
        # Paths are strings, not `Path`: every hook of the connector needs some.
        self._root = str(root)
        self._rank = rank
        self._ranks = range(world)
        self._epoch = f"{root}/epoch"

    def epoch(self) -> int:
        # Only a reset writes the file, so usually there is none.
        if not os.path.exists(self._epoch):
            return 0
        return int(Path(self._epoch).read_text())

    def reset(self) -> None:
        old = self.epoch()
        self._write(self._epoch, str(old + 1).encode())
        shutil.rmtree(f"{self._root}/{old}", ignore_errors=True)

    def put(self, epoch: int, key: str, layer: str, data: bytes) -> None:
        path = f"{self._chunk(epoch, key)}/{self._file(layer)}"
        self._keep(epoch, path, CHECKSUM.pack(zlib.crc32(data)) + data)

    def commit(self, epoch: int, key: str) -> None:
        self._keep(epoch, f"{self._chunk(epoch, key)}/{self._rank}.complete", b"")

    def has(self, key: str) -> bool:
        chunk = self._chunk(self.epoch(), key)
        return all(os.path.exists(f"{chunk}/{rank}.complete") for rank in self._ranks)

    def get(self, key: str, layer: str) -> bytes | None:
        if not self.has(key):
            return None
        return self._verified(Path(self._chunk(self.epoch(), key), self._file(layer)))

    def _verified(self, path: Path) -> bytes | None:
        """Return the data of a file; None if there is no file, or other data than were stored."""
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        checksum, data = raw[: CHECKSUM.size], raw[CHECKSUM.size :]
        return data if checksum == CHECKSUM.pack(zlib.crc32(data)) else None

    def drop(self, key: str) -> None:
        chunk = self._chunk(self.epoch(), key)
        # First, so that no lookup finds the chunk while its files are being removed.
        for rank in self._ranks:
            Path(f"{chunk}/{rank}.complete").unlink(missing_ok=True)
        shutil.rmtree(chunk, ignore_errors=True)

    def keys(self) -> Iterator[str]:
        names = [path.name for path in Path(self._root, str(self.epoch())).glob("*")]
        return iter(sorted(filter(self.has, names)))

    def _chunk(self, epoch: int, key: str) -> str:
        return f"{self._root}/{epoch}/{key}"

    def _file(self, layer: str) -> str:
        return f"{self._rank}.{quote(layer, safe='')}.kv"

    def _keep(self, epoch: int, path: str, data: bytes) -> None:
        """Write a file, unless the epoch is over.

        The epoch may end at any moment; then its directory is removed, with unfinished files.
        """
        if epoch != self.epoch():
            return
        try:
            self._write(path, data)
        except (FileNotFoundError, FileExistsError):
            # Either may come from a directory that is removed meanwhile.
            if epoch == self.epoch():
                raise

    @staticmethod
    def _write(path: str, data: bytes) -> None:
        """Write a file atomically: a reader sees the old file or the new one.

        The ids of process and thread keep two writers of the same chunk apart.
        """
        partial = f"{path}.{os.getpid()}.{threading.get_ident()}.partial"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(partial, "wb") as file:
            file.write(data)
        os.replace(partial, path)


def open_store(where: str, rank: int = 0, world: int = 1) -> Store:
    """Open the store at `where`: `memory:NAME` or a directory.

    `rank` is one of `world` workers that each store a shard of every chunk.
    """
    scheme, _, name = where.partition(":")
    if scheme == "memory":
        return MemoryStore(name, rank, world)
    return DirectoryStore(Path(where), rank, world)
