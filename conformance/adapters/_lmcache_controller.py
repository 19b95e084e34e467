# SPDX-License-Identifier: Apache-2.0
"""What an operator can ask of LMCache's engine, in the form that the suite wants (docs/cache.md).

The engine is called directly. LMCache's own controller, a process that sends messages to it, can do
less: it clears whole locations, and unpins nothing (`lmcache.v1.cache_controller.worker`).
"""

from __future__ import annotations

from typing import Any


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
        """Protect what is stored of these tokens from eviction."""
        self._engine.lookup(list(request.all_token_ids), lookup_id=_pin(request), pin=True)

    def unpin(self, request: Any) -> None:
        """Release the pin."""
        self._engine.lookup_unpin(_pin(request))


def _pin(request: Any) -> str:
    """Return the id under which LMCache keeps the pins of this content."""
    return f"kvconform-{hash(tuple(request.all_token_ids))}"
