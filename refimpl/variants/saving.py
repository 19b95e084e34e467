# SPDX-License-Identifier: Apache-2.0
"""Connectors that store later, or less, than they could (systems.md B4-B8, B12)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvconform.refimpl.connector import ReferenceConnector

if TYPE_CHECKING:
    from vllm.v1.request import Request

LEAST_PRIORITY = 0
SKIP_LAST = 2


class LazySaver(ReferenceConnector):
    """Stores nothing of the step under way, only what earlier steps have computed: [0, min(C, N))."""

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        return super()._save_bound(request, computed, 0)


class WholePromptSaver(ReferenceConnector):
    """Stores the prompt, at once, when its last chunk is computed; never the output."""

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        return request.num_prompt_tokens if computed + scheduled >= request.num_prompt_tokens else 0

    def _finish_bound(self, request: Request) -> int:
        return 0


class AtFinish(ReferenceConnector):
    """Stores everything at once, when the request has finished; what is preempted or aborted is not stored."""

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        return 0


class StoresNothing(ReferenceConnector):
    """Looks up and would load, as a consumer of a store that others fill; stores nothing itself."""

    def _worth_saving(self, request: Request, end: int) -> int:
        return 0


class Selective(ReferenceConnector):
    """Stores what is worth it (LMCache: skip_save, skip_last_n_tokens, priority_limit).

    Not what a client forbids in its ``kv_transfer_params``, not requests of low priority (greater numbers), never the last two tokens.
    """

    def _worth_saving(self, request: Request, end: int) -> int:
        if request.priority > LEAST_PRIORITY or (request.kv_transfer_params or {}).get("skip_save"):
            return 0
        return max(0, super()._worth_saving(request, end) - SKIP_LAST)
