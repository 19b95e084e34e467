# SPDX-License-Identifier: Apache-2.0
"""A correct connector that takes a step for each of its answers."""

from __future__ import annotations

from typing import Any

from kvconform.refimpl.connector import Lookup, ReferenceConnector


class UndecidedAgain(ReferenceConnector):
    """Answers the first lookup of a request with None, also when it asks for blocks once more."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._asked: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Lookup:
        if request.request_id not in self._asked:
            self._asked.add(request.request_id)
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._asked.discard(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
