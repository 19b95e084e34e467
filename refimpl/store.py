# SPDX-License-Identifier: Apache-2.0
"""Where chunks live: a dictionary shared within one process, or a directory shared between processes and restarts.

A chunk is stored layer by layer and counts as present only once every rank committed its shard, so nobody sees half of one.
``reset`` starts a new epoch: a store still under way belongs to the old one and never becomes visible.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol
from urllib.parse import quote


class Store(Protocol):
    def epoch(self) -> int:
        """The current epoch: how often the store was emptied."""

    def reset(self) -> None:
        """Forget every chunk, including those whose store has not been committed yet."""

    def put(self, epoch: int, key: str, layer: str, data: bytes) -> None:
        """Keep one layer of a chunk; invisible until ``commit``."""

    def commit(self, epoch: int, key: str) -> None:
        """All layers of this rank are there; when the other ranks' are too, lookups see the chunk."""

    def has(self, key: str) -> bool:
        """Whether all of the chunk can be read now."""

    def get(self, key: str, layer: str) -> bytes | None:
        """One layer of this rank's shard, None when it is gone."""

    def drop(self, key: str) -> None:
        """Forget one chunk, if it is there."""

    def keys(self) -> Iterator[str]:
        """The committed chunks."""


class MemoryStore:
    """Chunks in dictionaries that all stores of one name share: both halves of a connector in one process, and its ranks, find each
    other."""

    _named: ClassVar[dict[str, _Shelf]] = {}

    def __init__(self, name: str, rank: int = 0, world: int = 1) -> None:
        self._shelf = self._named.setdefault(name, _Shelf())
        self._rank, self._ranks = rank, set(range(world))

    def epoch(self) -> int:
        return self._shelf.epoch

    def reset(self) -> None:
        shelf = self._shelf
        shelf.epoch, shelf.data, shelf.committed = shelf.epoch + 1, {}, {}

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
    epoch: int = 0
    data: dict[tuple[str, int, str], bytes] = field(default_factory=dict)  # by chunk, rank, layer
    committed: dict[str, set[int]] = field(default_factory=dict)  # chunk to ranks


class DirectoryStore:
    """One file per chunk, rank and layer, ``<root>/<epoch>/<key>/<rank>.<layer>.kv``; a rank's file ``<rank>.complete`` commits its
    shard."""

    def __init__(self, root: Path, rank: int = 0, world: int = 1) -> None:
        self._root, self._rank, self._ranks = (
            str(root),
            rank,
            range(world),
        )  # text: every hook asks for something here
        self._epoch = f"{root}/epoch"

    def epoch(self) -> int:
        if not os.path.exists(self._epoch):  # a hundred times more often than not
            return 0
        return int(Path(self._epoch).read_text())

    def reset(self) -> None:
        old = self.epoch()
        self._write(self._epoch, str(old + 1).encode())
        shutil.rmtree(f"{self._root}/{old}", ignore_errors=True)

    def put(self, epoch: int, key: str, layer: str, data: bytes) -> None:
        self._keep(epoch, f"{self._chunk(epoch, key)}/{self._file(layer)}", data)

    def commit(self, epoch: int, key: str) -> None:
        self._keep(epoch, f"{self._chunk(epoch, key)}/{self._rank}.complete", b"")

    def has(self, key: str) -> bool:
        chunk = self._chunk(self.epoch(), key)
        return all(os.path.exists(f"{chunk}/{rank}.complete") for rank in self._ranks)

    def get(self, key: str, layer: str) -> bytes | None:
        try:
            return (
                Path(self._chunk(self.epoch(), key), self._file(layer)).read_bytes()
                if self.has(key)
                else None
            )
        except FileNotFoundError:
            return None

    def drop(self, key: str) -> None:
        chunk = self._chunk(self.epoch(), key)
        for rank in self._ranks:  # first: nobody may find a chunk that is going away
            Path(f"{chunk}/{rank}.complete").unlink(missing_ok=True)
        shutil.rmtree(chunk, ignore_errors=True)

    def keys(self) -> Iterator[str]:
        return iter(
            sorted(
                path.name
                for path in Path(self._root, str(self.epoch())).glob("*")
                if self.has(path.name)
            )
        )

    def _chunk(self, epoch: int, key: str) -> str:
        return f"{self._root}/{epoch}/{key}"

    def _file(self, layer: str) -> str:
        return f"{self._rank}.{quote(layer, safe='')}.kv"

    def _keep(self, epoch: int, path: str, data: bytes) -> None:
        """Write, unless the epoch is over. It may end at any moment: then the directory goes, and what was half written with it."""
        if epoch != self.epoch():
            return
        try:
            self._write(path, data)
        except (FileNotFoundError, FileExistsError):  # the second: it was there for a moment only
            if epoch == self.epoch():
                raise

    @staticmethod
    def _write(path: str, data: bytes) -> None:
        """Atomic: a reader sees the old file or the new one. The ids of process and thread keep two writers of one chunk apart."""
        partial = f"{path}.{os.getpid()}.{threading.get_ident()}.partial"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(partial, "wb") as file:
            file.write(data)
        os.replace(partial, path)


def open_store(where: str, rank: int = 0, world: int = 1) -> Store:
    """``memory:NAME`` or a directory; ``rank`` of ``world`` workers that each keep a shard of every chunk."""
    scheme, _, name = where.partition(":")
    return (
        MemoryStore(name, rank, world)
        if scheme == "memory"
        else DirectoryStore(Path(where), rank, world)
    )
