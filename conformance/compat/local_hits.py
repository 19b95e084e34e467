# SPDX-License-Identifier: Apache-2.0
"""How much of a request vLLM takes from its own prefix cache when it admits the request.

A connector that supports divergent hits is asked behind the hit of the full attention, which may be
deeper than that of the recurrent layers. If it has nothing there, vLLM goes back to the hit that
all groups share, without a word to the connector (v1/core/sched/scheduler.py: Scheduler.schedule).
"""

from __future__ import annotations

from typing import Any

ARGUMENT = "num_new_computed_tokens"


class LocalHits:
    """The tokens of the latest local hits, by request id. Wraps `allocate_slots` of `manager`."""

    def __init__(self, manager: Any) -> None:
        self._taken: dict[str, int] = {}
        if hasattr(manager, "get_computed_blocks_for_connector"):  # since 0.31
            self._allocate = manager.allocate_slots
            manager.allocate_slots = self._allocate_slots

    def _allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        local = kwargs.get(ARGUMENT, args[1] if len(args) > 1 else 0)
        self._taken[request.request_id] = request.num_computed_tokens + local
        return self._allocate(request, *args, **kwargs)

    def of(self, req_id: str, asked: int) -> int:
        """Return the tokens that are local where the connector was asked behind `asked` ones."""
        return min(asked, self._taken.get(req_id, asked))
