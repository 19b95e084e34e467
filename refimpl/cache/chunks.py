# SPDX-License-Identifier: Apache-2.0
"""The store of a connector: chunks of KV by key, layer by layer, over a back end.

A chunk is stored as one value per rank, with all layers of the rank's shard. It is present when
every rank has committed its value, so a reader never sees an incomplete chunk. `reset` starts a new
epoch: writes that are still under way belong to the old epoch and never become visible. A back end
that fails is an empty store: nothing is found, and what is saved is lost.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from kvconform.refimpl.cache.backend import Backend, StoreError
from kvconform.refimpl.cache.batches import get_many, set_many
from kvconform.refimpl.cache.patience import PATIENCE
from kvconform.refimpl.cache.seal import packed, seal, unpacked, unseal
from kvconform.refimpl.cache.urls import open_backend

EPOCH = "epoch"
"""Key of the number of resets. Only a reset stores it, so usually there is none."""
VALUES = "chunks/"
"""Start of the keys of chunks: `chunks/EPOCH/CHUNK/RANK`."""
EPOCH_OF = re.compile(r"chunks/([0-9]{1,18})/")
"""Start of a chunk's key. Others may be in a store that has other users."""
UNKNOWN = -1
"""The epoch of a store whose number of resets is damaged: it has no chunks."""


def chunk_of(key: str) -> str:
    """Return the chunk that a back end's key belongs to; "" for the key of anything else."""
    parts = key.split("/")
    return parts[2] if len(parts) > 2 else ""


def _resets(stored: bytes | None) -> int:
    """Return the number of resets in a stored value; UNKNOWN if it is damaged."""
    try:
        return int(unseal(EPOCH, stored or b"") or b"")
    except ValueError:
        return UNKNOWN


class ChunkStore:
    """The store as one of `world` ranks sees it, which each store a shard of every chunk.

    `durable`: the back end that knows how often the store was reset; by default `backend`.
    """

    def __init__(
        self, backend: Backend, rank: int = 0, world: int = 1, durable: Backend | None = None
    ) -> None:
        self.backend = backend
        self.lost = 0
        """Chunks that could not be stored."""
        self._durable = durable or backend
        self._rank = rank
        self._ranks = range(world)
        self._epoch = 0
        # Layers of chunks that are not committed, by thread, epoch and key.
        self._staged: dict[tuple[int, int, str], dict[str, bytes]] = {}
        # The value that was read last: callers ask for its layers one after the other.
        self._latest: tuple[str, dict[str, bytes]] = ("", {})

    def epoch(self) -> int:
        """Return the current epoch: how often the store was reset.

        If the back end fails, it is the last one that was known. If the back end has lost it, the
        last one is stored again: chunks from before the reset may still be there.
        """
        with suppress(StoreError):
            if self._durable.exists(EPOCH):
                self._epoch = _resets(self._durable.get(EPOCH))
            elif self._epoch > 0:
                self._store_epoch(self._epoch)
            else:
                self._epoch = 0
        return self._epoch

    def _store_epoch(self, number: int) -> None:
        self._durable.set(EPOCH, seal(EPOCH, str(number).encode()))
        self._epoch = number

    def reset(self) -> bool:
        """Forget every chunk, also those that are not committed yet; return whether that worked."""
        try:
            old = [*self.backend.list(VALUES)]
            numbers = [int(found[1]) for key in old if (found := EPOCH_OF.match(key))]
            self._store_epoch(max([self.epoch(), *numbers]) + 1)
        except StoreError:
            return False
        for key in old:
            self._delete(key)
        return True

    def put(self, epoch: int, key: str, layer: str, data: bytes) -> None:
        """Keep one layer of a chunk until `commit`, which the same thread calls."""
        self._staged.setdefault((threading.get_ident(), epoch, key), {})[layer] = data

    def commit(self, epoch: int, key: str) -> None:
        """Store this rank's shard; the chunk is visible when all ranks have done so.

        Equal requests save the same chunk in one step: the second one has no layers left to store.
        """
        layers = self._staged.pop((threading.get_ident(), epoch, key), {})
        if not layers or epoch != self.epoch():
            return
        name = self._name(epoch, key, self._rank)
        self._latest = ("", {})
        try:
            self.backend.set(name, self._sealed(name, layers))
        except StoreError:
            self.lost += 1
        if epoch != self.epoch():
            self._delete(name)  # the reset did not see it

    def commit_many(self, epoch: int, keys: Sequence[str]) -> None:
        """Store this rank's shards of the chunks that have layers, in one call of the back end."""
        staged = {
            self._name(epoch, key, self._rank): self._staged.pop(
                (threading.get_ident(), epoch, key), {}
            )
            for key in keys
        }
        if epoch != self.epoch():
            return
        self._latest = ("", {})
        values = {name: self._sealed(name, layers) for name, layers in staged.items() if layers}
        try:
            set_many(self.backend, values)
        except StoreError:
            self.lost += len(values)
        if epoch != self.epoch():
            for name in values:
                self._delete(name)  # the reset did not see it

    def discard(self) -> None:
        """Drop the layers that this thread has put and not committed, and the value read last."""
        self._latest = ("", {})
        mine = threading.get_ident()
        self._staged = {key: layers for key, layers in self._staged.items() if key[0] != mine}

    def has(self, key: str) -> bool:
        """Return whether the whole chunk can be read now."""
        return self._is_complete(self.epoch(), key)

    def _is_complete(self, epoch: int, key: str) -> bool:
        with suppress(StoreError):
            return all(self.backend.exists(self._name(epoch, key, rank)) for rank in self._ranks)
        return False

    def get(self, key: str, layer: str) -> bytes | None:
        """Return one layer of this rank's shard; None if it is gone."""
        return self.read(key).get(layer)

    def read(self, key: str) -> dict[str, bytes]:
        """Return the layers of this rank's shard by name; none if the chunk is gone."""
        epoch = self.epoch()
        if not self._is_complete(epoch, key):
            return {}
        name = self._name(epoch, key, self._rank)
        if self._latest[0] == name:
            return self._latest[1]
        with suppress(StoreError):
            layers = self._opened(name, self.backend.get(name))
            self._latest = (name, layers)
            return layers
        return {}

    def read_many(self, keys: Sequence[str]) -> list[dict[str, bytes]]:
        """Do what `read` does for several chunks, in one call of the back end."""
        epoch = self.epoch()
        names = [self._name(epoch, key, self._rank) for key in keys]
        complete = [
            name for name, key in zip(names, keys, strict=True) if self._is_complete(epoch, key)
        ]
        found: dict[str, bytes] = {}
        with suppress(StoreError):
            found = get_many(self.backend, complete)
        return [self._opened(name, found.get(name)) for name in names]

    def _sealed(self, name: str, layers: Mapping[str, bytes]) -> bytes:
        return seal(name, packed(layers))

    def _opened(self, name: str, stored: bytes | None) -> dict[str, bytes]:
        """Return the layers in a value; none if it is not what was stored under this name."""
        data = None if stored is None else unseal(name, stored)
        return {} if data is None else unpacked(data)

    def drop(self, key: str, rank: int | None = None) -> None:
        """Forget one chunk, if it is present, or a rank's shard of it.

        A chunk that cannot be deleted stays present.
        """
        self._latest = ("", {})
        names = self.names(key)
        for name in names if rank is None else names[rank : rank + 1]:
            self._delete(name)

    def _delete(self, name: str) -> None:
        with suppress(StoreError):
            self.backend.delete(name)

    def keys(self) -> Iterator[str]:
        """Return the keys of the chunks that are present."""
        names: list[str] = []
        with suppress(StoreError):
            names += self.backend.list(f"{VALUES}{self.epoch()}/")
        return iter(sorted(filter(self.has, {chunk_of(name) for name in names})))

    def close(self) -> None:
        """Release the connections."""
        self.backend.close()

    def names(self, key: str) -> list[str]:
        """Return the back end's keys of a chunk, by rank."""
        epoch = self.epoch()
        return [self._name(epoch, key, rank) for rank in self._ranks]

    @staticmethod
    def _name(epoch: int, key: str, rank: int) -> str:
        return f"{VALUES}{epoch}/{key}/{rank}"


def open_store(url: str, rank: int = 0, world: int = 1, patience: float = PATIENCE) -> ChunkStore:
    """Open the store at a URL or in a directory, as one of `world` ranks (see open_backend)."""
    return ChunkStore(open_backend(url, patience), rank, world)
