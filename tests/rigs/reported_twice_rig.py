# SPDX-License-Identifier: Apache-2.0
"""A connector that reports both the load and the send of an aborted request.

It returns True for a request whose load the engine waits for, and reports its send one step later.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvconform.refimpl.connector import Finish, ReferenceConnector


class ReportsSendToo(ReferenceConnector):
    held: ClassVar[set[str]] = set()  # of both halves

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        holds, params = super().request_finished(request, block_ids)
        if request.request_id in self._loading:
            self.held.add(request.request_id)
            holds = True
        return holds, params

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        also = self.held & finished_req_ids
        self.held.difference_update(also)
        return (sent or set()) | also or None, received
