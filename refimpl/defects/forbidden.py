# SPDX-License-Identifier: Apache-2.0
"""Planted defects: connectors that store what they are not to store, or skip what they owe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import Finish, ReferenceConnector
from kvconform.refimpl.variants.peer import Peer
from kvconform.refimpl.variants.saving import LEAST_PRIORITY, SKIP_LAST, Selective

if TYPE_CHECKING:
    from vllm.v1.request import Request


class SavesDecodeAnyway(ReferenceConnector):
    """Saves the KV of output when the request has finished, although it is to save prompts only."""

    def _finish_bound(self, request: Request) -> int:
        return min(request.num_computed_tokens, request.num_tokens - 1)


class ForgetsTheVeto(Selective):
    """Looks for `skip_save` in the plan of a step, and not when the request has finished."""

    def _finish_bound(self, request: Request) -> int:
        if request.priority > LEAST_PRIORITY:
            return 0
        return min(request.num_computed_tokens, request.num_tokens - 1) - SKIP_LAST


class GreaterIsHigher(Selective):
    """Takes a greater number for a higher priority."""

    def _worth_saving(self, request: Request, end: int) -> int:
        if request.priority < LEAST_PRIORITY or (request.kv_transfer_params or {}).get("skip_save"):
            return 0
        return max(0, end - SKIP_LAST)


class SkipsLastOfTheStep(Selective):
    """Leaves the last tokens out of what a step saves, and not of the last save of a request."""

    def _finish_bound(self, request: Request) -> int:
        return super()._finish_bound(request) and min(
            request.num_computed_tokens, request.num_tokens - 1
        )


class SkipsTheTransfer(Peer):
    """Hands nothing over of a request that forbids to store it."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        if (request.kv_transfer_params or {}).get("skip_save"):
            return False, None
        return super().request_finished(request, block_ids)
