# SPDX-License-Identifier: Apache-2.0
"""Tests that LMCache's engine is asked what the suite's controller is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvconform.adapters._lmcache_controller import Controller


class Engine:
    """Has 8 of the first tokens on disk, and 4 in memory."""

    def __init__(self) -> None:
        self.storage_manager = SimpleNamespace(storage_backends={"memory": None, "disk": None})
        self.pinned: list[Any] = []
        self.cleared: list[Any] = []

    def lookup(
        self,
        tokens: list[int],
        search_range: list[str] | None = None,
        lookup_id: str | None = None,
        pin: bool = False,
    ) -> int:
        if pin:
            self.pinned.append((lookup_id, tokens))
        return 4 if search_range == ["memory"] else 8

    def lookup_unpin(self, lookup_id: str) -> None:
        self.pinned = [each for each in self.pinned if each[0] != lookup_id]

    def clear(self, tokens: list[int]) -> None:
        self.cleared.append(tokens)


def test_operations() -> None:
    engine = Engine()
    controller = Controller(engine)
    request = SimpleNamespace(all_token_ids=(5, 6, 7))
    assert controller.lookup(request) == {"found": 8, "at": {"memory": 4, "disk": 8}}
    controller.pin(request)
    assert [tokens for _, tokens in engine.pinned] == [[5, 6, 7]]
    controller.unpin(request)
    controller.clear(request)
    assert (engine.pinned, engine.cleared) == ([], [[5, 6, 7]])
