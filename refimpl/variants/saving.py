# SPDX-License-Identifier: Apache-2.0
"""Connectors that save later or less than they could (systems.md B4-B8, B12)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import ReferenceConnector

if TYPE_CHECKING:
    from vllm.v1.request import Request

LEAST_PRIORITY = 0
"""Greater numbers are lower priorities."""
SKIP_LAST = 2
"""Tokens."""


class LazySaver(ReferenceConnector):
    """Saves only what earlier steps have computed: [0, min(C, N))."""

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        return super()._save_bound(request, computed, 0)


class WholePromptSaver(ReferenceConnector):
    """Saves the whole prompt in the step that completes it; never the output."""

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        is_complete = computed + scheduled >= request.num_prompt_tokens
        return request.num_prompt_tokens if is_complete else 0

    def _finish_bound(self, request: Request) -> int:
        return 0


class AtFinish(ReferenceConnector):
    """Saves everything when the request has finished; nothing when it is preempted or aborted."""

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        return 0


class WholeChunks(ReferenceConnector):
    """Saves and serves whole chunks of several blocks only.

    Up to which position a connector claims is its own decision
    (KVConnectorBase_V1.get_num_new_matched_tokens). A chunk with the last known token is not
    served, because the engine computes that token.
    """

    def _claim(self, request: Request, found: int) -> int:
        claim = super()._claim(request, found)
        return claim - claim % self.options.chunk_tokens


class StoresNothing(ReferenceConnector):
    """Looks up and loads, like a consumer of a store that others fill; saves nothing itself."""

    def _worth_saving(self, request: Request, end: int) -> int:
        return 0


class Selective(ReferenceConnector):
    """Saves selectively (LMCache: skip_save, skip_last_n_tokens, priority_limit).

    It does not save what a client excludes in its `kv_transfer_params`, requests of low priority,
    and the last two tokens. vLLM passes the parameters on as the client sent them (Request).
    """

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return super().kvconform_capabilities(extra_config) | {
            "skip_save": "skip_save",
            "least_priority": LEAST_PRIORITY,
            "skip_last": SKIP_LAST,
        }

    def _worth_saving(self, request: Request, end: int) -> int:
        if request.priority > LEAST_PRIORITY or (request.kv_transfer_params or {}).get("skip_save"):
            return 0
        return max(0, super()._worth_saving(request, end) - SKIP_LAST)
