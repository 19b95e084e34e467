# SPDX-License-Identifier: Apache-2.0
"""The waiting queue: first come, first served, or by priority."""

from __future__ import annotations

from bisect import insort
from collections import deque

from vllm.v1.request import Request


class WaitingQueue(deque[Request]):
    """Waiting requests, the next one first.

    With `priority`, they are in the requests' own order: priority, arrival, id.
    """

    def __init__(self, priority: bool) -> None:
        super().__init__()
        self._priority = priority

    def add_request(self, request: Request) -> None:
        """Queue a request behind its equals."""
        if self._priority:
            insort(self, request)
        else:
            self.append(request)

    def prepend_requests(self, requests: list[Request]) -> None:
        """Put requests back in front, in their own order."""
        for request in reversed(requests):
            if self._priority:
                insort(self, request)
            else:
                self.appendleft(request)

    def remove_requests(self, requests: set[Request]) -> None:
        """Remove these requests from the queue, if they are in it."""
        for request in requests.intersection(self):
            self.remove(request)
