# SPDX-License-Identifier: Apache-2.0
"""A queue for transfers that take a while: an item is due a number of polls after it was added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Countdown(Generic[T]):
    """A queue whose items wait for polls instead of time.

    The engine polls a connector once per step, so the delays are deterministic.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, T]] = []
        self._polls = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, polls: int) -> None:
        """Add an item that is due after `polls` further polls; 0: at the next poll."""
        self._waiting.append((self._polls + polls, item))

    def poll(self) -> list[T]:
        """Remove and return the items that are due, in the order in which they were added."""
        due = [item for at, item in self._waiting if at <= self._polls]
        self._waiting = [(at, item) for at, item in self._waiting if at > self._polls]
        self._polls += 1
        return due

    def drop(self, unwanted: Callable[[T], bool]) -> None:
        """Remove the items for which `unwanted` is true."""
        self._waiting = [(at, item) for at, item in self._waiting if not unwanted(item)]

    def take(self, wanted: Callable[[T], bool] = lambda item: True) -> list[T]:
        """Remove and return the items for which `wanted` is true, due or not; default: all."""
        taken = [item for _, item in self._waiting if wanted(item)]
        self.drop(wanted)
        return taken
