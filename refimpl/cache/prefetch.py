# SPDX-License-Identifier: Apache-2.0
"""A back end whose values a thread fetches into memory before they are read.

An owner is a named user of values. A value stays in memory until all its owners have released it,
or until it is deleted or replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kvconform.refimpl.cache.backend import Backend, StoreError
from kvconform.refimpl.cache.batches import batches, get_many, set_many


class Prefetching:
    """A back end over another one. `bound`: values in memory; `batch`: values per call."""

    def __init__(self, backend: Backend, bound: int, batch: int) -> None:
        self._backend = backend
        self._bound = bound
        self._batch = batch
        self._lock = threading.Lock()
        self._owners: dict[str, set[str]] = {}
        # What was fetched for an owner, also what was not there.
        self._tried: dict[str, set[str]] = {}
        # Fetched values; None: it is under way.
        self._values: dict[str, bytes | None] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._is_closed = False

    def __len__(self) -> int:
        """Return how many values are in memory or under way."""
        return len(self._values)

    def prefetch(self, owner: str, keys: Iterable[str]) -> bool:
        """Start to fetch the values that are not in memory yet; return whether none is under way.

        For an owner, a value is fetched once. Values beyond the bound are not fetched: `get` reads
        them. After `close`, nothing is fetched.
        """
        with self._lock:
            if self._is_closed:
                return True
            wanted = list(keys)
            tried = self._tried.setdefault(owner, set())
            new = [key for key in wanted if key not in self._values and key not in tried]
            new = new[: max(0, self._bound - len(self._values))]
            tried.update(new)
            self._values |= dict.fromkeys(new)
            for key in wanted:
                if key in self._values:
                    self._owners.setdefault(key, set()).add(owner)
            for batch in batches(new, self._batch):
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, "prefetch")
                self._thread.submit(self._fetch, batch)
            return all(self._values.get(key, b"") is not None for key in wanted)

    def _fetch(self, keys: Sequence[str]) -> None:
        """Fetch values, and keep those that are still wanted. Runs on the thread."""
        found: dict[str, bytes] = {}
        try:
            with suppress(StoreError):
                found = get_many(self._backend, keys)
        finally:  # also after another error: nothing waits for these values for ever
            self._arrived(keys, found)

    def _arrived(self, keys: Sequence[str], found: Mapping[str, bytes]) -> None:
        with self._lock:
            for key in keys:
                if key not in self._values:
                    continue  # released, deleted or replaced
                if key in found:
                    self._values[key] = found[key]
                else:
                    self._forget(key)

    def release(self, owner: str) -> None:
        """Forget the values that no other owner wants."""
        with self._lock:
            self._tried.pop(owner, None)
            for key, owners in list(self._owners.items()):
                owners.discard(owner)
                if not owners:
                    self._forget(key)

    def _forget(self, key: str) -> None:
        self._values.pop(key, None)
        self._owners.pop(key, None)

    def exists(self, key: str) -> bool:
        return self._values.get(key) is not None or self._backend.exists(key)

    def get(self, key: str) -> bytes | None:
        value = self._values.get(key)
        return self._backend.get(key) if value is None else value

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values that there are, those in memory without a call."""
        found = {key: value for key in keys if (value := self._values.get(key)) is not None}
        missing = [key for key in keys if key not in found]
        return found | (get_many(self._backend, missing) if missing else {})

    def set(self, key: str, value: bytes) -> None:
        self.set_many({key: value})

    def set_many(self, values: Mapping[str, bytes]) -> None:
        """Store values, and forget those that they replace."""
        set_many(self._backend, values)
        with self._lock:
            for key in values:
                self._forget(key)

    def list(self, prefix: str = "") -> Iterator[str]:
        return self._backend.list(prefix)

    def delete(self, key: str) -> None:
        with self._lock:
            self._forget(key)
        self._backend.delete(key)

    def close(self) -> None:
        """End the thread, and forget all values. May be called twice."""
        with self._lock:
            self._is_closed = True
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
        with self._lock:
            self._values.clear()
            self._owners.clear()
            self._tried.clear()
        self._backend.close()
