# SPDX-License-Identifier: Apache-2.0
"""Connectors that store later, or less, than they could."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvconform.refimpl.connector import ReferenceConnector

if TYPE_CHECKING:
    from vllm.v1.request import Request


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
