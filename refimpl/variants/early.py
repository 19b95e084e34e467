# SPDX-License-Identifier: Apache-2.0
"""A correct connector for engines that count an asynchronous load only when it has finished.

vLLM did so until 0.16.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request

from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector


class RemembersLocalHit(ReferenceConnector):
    """Takes the start of a load from the last lookup.

    That is the lookup of the grant: the engine looks up again before every allocation.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._local: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        self._local[request.request_id] = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        self._local.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def _grant_end(self, request: Request, granted: int) -> int:
        return self._local[request.request_id] + granted
