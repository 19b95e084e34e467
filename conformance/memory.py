# SPDX-License-Identifier: Apache-2.0
"""What the engines of one run ever computed."""

from __future__ import annotations


class Memory:
    """What all engines of one run ever computed (content ids), before and since the last reset of the connector's store."""

    def __init__(self) -> None:
        self.ever: set[int] = set()
        self.plain: set[int] = set()
        self.since_reset: set[int] = set()

    def computed(self, ids: list[int], plain: list[int]) -> None:
        """Note content ids (and the ids of the same tokens without identity) that now exist in an engine's cache."""
        self.ever.update(ids)
        self.plain.update(plain)
        self.since_reset.update(ids)

    def reset(self, kept: set[int]) -> None:
        """The connector said that its store is empty; `kept` are content ids that requests still hold in the engine's own cache."""
        self.since_reset = kept


class PartMemory(Memory):
    """What one of several engines computed (`own`); `ever` and `plain` are those of all of them."""

    def __init__(self, whole: Memory) -> None:
        self.ever, self.plain, self.since_reset = whole.ever, whole.plain, whole.since_reset
        self.own: set[int] = set()

    def computed(self, ids: list[int], plain: list[int]) -> None:
        """As Memory.computed, and note whose it was."""
        super().computed(ids, plain)
        self.own.update(ids)
