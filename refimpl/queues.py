# SPDX-License-Identifier: Apache-2.0
"""The waiting queue: first come first served, or by priority."""

from __future__ import annotations

from bisect import insort
from collections import deque

from vllm.v1.request import Request


class WaitingQueue(deque[Request]):
    """Requests that wait, the next one first. With `priority`, the order is the requests' own (priority, arrival, id)."""

    def __init__(self, priority: bool) -> None:
        super().__init__()
        self._priority = priority

    def add_request(self, request: Request) -> None:
        """Queue a request behind its equals."""
        insort(self, request) if self._priority else self.append(request)

    def prepend_requests(self, requests: list[Request]) -> None:
        """Put requests back in front, in their own order."""
        for request in reversed(requests):
            insort(self, request) if self._priority else self.appendleft(request)

    def remove_requests(self, requests: set[Request]) -> None:
        """Drop these requests, wherever they are."""
        for request in requests.intersection(self):
            self.remove(request)
