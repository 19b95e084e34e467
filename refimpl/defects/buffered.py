# SPDX-License-Identifier: Apache-2.0
"""Planted defects: prefetched values, batches, and host buffers that are used again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvconform.refimpl.cache.prefetch import Prefetching
from kvconform.refimpl.cache.staging import Buffer, Staging
from kvconform.refimpl.plan import Load
from kvconform.refimpl.variants.buffered import Batch, Buffered


class _Collects(Staging[Batch]):
    def incoming(
        self, work: Iterable[Batch], fill: Callable[[Batch, Buffer], None]
    ) -> Iterator[tuple[Batch, Buffer]]:
        yield from list(super().incoming(work, fill))


class ReusesBusyBuffers(Buffered):
    """Fills a buffer again before its copy into the paged cache has ended."""

    staging_kind = _Collects


class StoresFullBatchesOnly(Buffered):
    """Stores a batch when it is full, and never the rest at the end."""

    def _store_batch(self, epoch: int, batch: Batch, layers: Sequence[str], buffer: Buffer) -> None:
        if len(batch) == self.options.batch:
            super()._store_batch(epoch, batch, layers, buffer)


class LoadsFullBatchesOnly(Buffered):
    """Copies full batches into the paged cache, and forgets the rest at the end."""

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        whole = len(load.pieces) // self.options.batch * self.options.batch
        rest = Load(load.req, load.start, load.end, load.pieces[:whole], load.is_async)
        super()._load(rest, layers)


class _Everlasting(Prefetching):
    """Knows its values by chunk and rank, and not by how often the store was reset.

    Waits for the fetch: otherwise the reset of a case could come before there is a value.
    """

    def prefetch(self, owner: str, keys: Iterable[str]) -> bool:
        names = [self._fetched(key) for key in keys]
        while not super().prefetch(owner, names):
            time.sleep(0.001)
        return True

    def exists(self, key: str) -> bool:
        return self._fetched(key) in self._values or super().exists(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        found = super().get_many([self._fetched(key) for key in keys])
        return {key: found[self._fetched(key)] for key in keys if self._fetched(key) in found}

    def delete(self, key: str) -> None:
        self._backend.delete(key)

    def _fetched(self, key: str) -> str:
        """Return the key under which the same chunk and rank was fetched, in any epoch."""
        _, _, shard = key.partition("/")[2].partition("/")
        return next((name for name in self._values if name.endswith(f"/{shard}")), key)


class ServesPrefetchedAfterReset(Buffered):
    """Answers a lookup from what it has prefetched, although the store was reset since."""

    memory_kind = _Everlasting


class _ReleasesWhenLoaded(Prefetching):
    def release(self, owner: str) -> None:
        if self._is_loading:
            super().release(owner)

    _is_loading = False


class KeepsUnwanted(Buffered):
    """Releases what it has prefetched when it was loaded, which an aborted request never does."""

    memory_kind = _ReleasesWhenLoaded

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        assert isinstance(self._memory, _ReleasesWhenLoaded)
        self._memory._is_loading = True
        super()._load(load, layers)
        self._memory._is_loading = False
