# SPDX-License-Identifier: Apache-2.0
"""A connector over tiers whose first level is written to the lowest one later (systems.md C2)."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvconform.refimpl.cache.backend import StoreError
from kvconform.refimpl.cache.chunks import chunk_of
from kvconform.refimpl.cache.holds import Holds
from kvconform.refimpl.cache.tiers import Tiers
from kvconform.refimpl.variants.tiers import Tiered

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

DELAY = 0.05
"""Seconds until a value of the first level is written to the lowest one."""


class WriteBehind(Tiers):
    """Levels whose first one takes new values; threads write them to the lowest one, slowly.

    A value is held until it is written. If all values of the first level are held, a new one goes
    further down at once.
    """

    holds: Holds

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._writing: set[threading.Timer] = set()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            super().set(key, value)
            if self.levels[0].exists(key):
                self.holds.take([chunk_of(key)])
                timer = threading.Timer(DELAY, self._write, [key])
                self._writing.add(timer)
                timer.start()

    def _write(self, key: str) -> None:
        """Copy a value to the lowest level, unless it was deleted, and release it. On a thread."""
        with self._lock:
            with suppress(StoreError):
                value = self.levels[0].backend.get(key)
                if value is not None:
                    self._store(len(self.levels) - 1, key, value)
            self.holds.release([chunk_of(key)])
            self._writing -= {
                timer for timer in self._writing if timer is threading.current_thread()
            }

    def flush(self) -> None:
        """Wait for the threads first."""
        with self._lock:
            writing = list(self._writing)
        for timer in writing:
            timer.join()
        super().flush()


class SlowWriteBehind(Tiered):
    """Answers from the first level what the lowest one does not have yet.

    Like vLLM's manager of tiers, which offloads to the secondary ones after the primary one has the
    block (TieringOffloadingManager.complete_store).
    """

    tiers_kind: ClassVar[type[Tiers]] = WriteBehind

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        tiers = self._cache.tiers
        assert isinstance(tiers, WriteBehind)
        tiers.holds = self._cache.holds
