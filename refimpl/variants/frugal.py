# SPDX-License-Identifier: Apache-2.0
"""Connectors that do their best and no more: what is not worth the trouble, or too much at once, is computed instead.

They declare nothing: what they promise is learned from what they do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.plan import ReferenceMetadata, Save

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

WORTH_LOADING = 24
LOADS_PER_STEP = 1
SAVES_PER_STEP = 2


class Undeclared(ReferenceConnector):
    """Says nothing about itself."""

    kvconform_capabilities = None  # type: ignore[assignment]


class WorthLoading(Undeclared):
    """Loads 24 tokens or more beyond the local hit, or none (LMCache: min_retrieve_tokens)."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (tokens, is_async) if tokens is not None and tokens >= WORTH_LOADING else (0, False)


class OneLoadPerStep(Undeclared):
    """Loads for one request per step; the others do without."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if len(self._granted) >= LOADS_PER_STEP:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class SaveBudget(Undeclared):
    """Saves two chunks per step, of whichever requests come first; what is over is not saved at all."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata, left, saves = super().build_connector_meta(scheduler_output), SAVES_PER_STEP, list[Save]()
        assert isinstance(metadata, ReferenceMetadata)
        for save in metadata.saves:
            pieces = save.pieces if save.final else save.pieces[:left]
            left -= 0 if save.final else len(pieces)
            saves.append(replace(save, pieces=pieces))
        return replace(metadata, saves=tuple(saves))
