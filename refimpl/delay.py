# SPDX-License-Identifier: Apache-2.0
"""Transfers that take a while, without threads: an item comes due a number of polls after it was added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Countdown(Generic[T]):
    """A queue whose items wait for polls. The engine polls a connector once per step, so delays repeat from run to run."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, T]] = []
        self._polls = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: T, polls: int) -> None:
        """``polls`` = 0: due at the next poll."""
        self._waiting.append((self._polls + polls, item))

    def poll(self) -> list[T]:
        """The items that are due now, in the order in which they were added."""
        due = [item for at, item in self._waiting if at <= self._polls]
        self._waiting = [(at, item) for at, item in self._waiting if at > self._polls]
        self._polls += 1
        return due

    def drop(self, unwanted: Callable[[T], bool]) -> None:
        self._waiting = [(at, item) for at, item in self._waiting if not unwanted(item)]

    def take(self) -> list[T]:
        """All items, due or not; none are left."""
        taken, self._waiting = [item for _, item in self._waiting], []
        return taken
