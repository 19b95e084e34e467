# SPDX-License-Identifier: Apache-2.0
"""Connectors that do their best and no more: what is not worth the trouble, or too much at once, is computed instead.

They declare nothing: what they promise is learned from what they do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.plan import ReferenceMetadata, Save
from kvconform.refimpl.store import Store

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

WORTH_LOADING = 24
LOADS_PER_STEP = 1
SAVES_PER_STEP = 2
LIFETIME = 10


class Undeclared(ReferenceConnector):
    """Says nothing about itself."""

    kvconform_capabilities = None  # type: ignore[assignment]


class WorthLoading(Undeclared):
    """Loads 24 tokens or more beyond the local hit, or none (LMCache: min_retrieve_tokens)."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (tokens, is_async) if tokens is not None and tokens >= WORTH_LOADING else (0, False)


class OneLoadPerStep(Undeclared):
    """Loads for one request per step; the others do without."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if len(self._granted) >= LOADS_PER_STEP:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class SaveBudget(Undeclared):
    """Saves two chunks per step, of whichever requests come first; what is over is not saved at all."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata, left, saves = (
            super().build_connector_meta(scheduler_output),
            SAVES_PER_STEP,
            list[Save](),
        )
        assert isinstance(metadata, ReferenceMetadata)
        for save in metadata.saves:
            pieces = save.pieces if save.final else save.pieces[:left]
            left -= 0 if save.final else len(pieces)
            saves.append(replace(save, pieces=pieces))
        return replace(metadata, saves=tuple(saves))


class Expiring(Undeclared):
    """Answers for a chunk for ten steps after it was first seen in the store; after that it must be saved again."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._store: Any = self._store if role.name == "WORKER" else Clocked(self._store)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ReferenceMetadata)
        self._store.tick(piece.key for save in metadata.saves for piece in save.pieces)
        return metadata


class Clocked:
    """A store as one who looks at the clock sees it. What expired stays where it is: a load may be on its way."""

    def __init__(self, store: Store) -> None:
        self._store, self._now, self._since = store, 0, dict[str, int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def has(self, key: str) -> bool:
        return (
            self._store.has(key) and self._now - self._since.setdefault(key, self._now) < LIFETIME
        )

    def tick(self, saved: Iterable[str]) -> None:
        """A step went by; `saved` live anew."""
        self._now += 1
        self._since |= dict.fromkeys(saved, self._now)
