# SPDX-License-Identifier: Apache-2.0
"""LMCache's controller, as the suite asks for one (docs/cache.md).

LMCache's controller sends messages to the worker of an engine, which calls the engine
(`lmcache.v1.cache_controller.worker`). Here the engine is in the same process and called directly.
"""

from __future__ import annotations

from typing import Any

PIN = "kvconform"
"""Id under which LMCache keeps the pins."""


class Controller:
    """Operations of LMCache on the tokens of a request; `engine`: its LMCacheEngine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def lookup(self, request: Any) -> dict[str, Any]:
        """Return how many of the first tokens are there (`found`), and how many where (`at`)."""
        tokens = list(request.all_token_ids)
        backends = self._engine.storage_manager.storage_backends
        at = {name: self._engine.lookup(tokens, search_range=[name]) for name in backends}
        return {"found": self._engine.lookup(tokens), "at": at}

    def clear(self, request: Any) -> None:
        """Remove the chunks of these tokens everywhere."""
        self._engine.clear(list(request.all_token_ids))

    def pin(self, request: Any) -> None:
        """Keep what is there of these tokens."""
        self._engine.lookup(list(request.all_token_ids), lookup_id=PIN, pin=True)

    def unpin(self, request: Any) -> None:
        """Release the pin."""
        self._engine.lookup_unpin(PIN)
