# SPDX-License-Identifier: Apache-2.0
"""The source of what is drawn at random. Hypothesis drew at first, and took longer to draw a workload than the workload took to run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """The same seed is the same draws, on every machine."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(f"kvconform/{seed}")

    def pick(self, options: Sequence[T]) -> T:
        """One of them; what is there twice is picked twice as often."""
        return options[int(self._random.random() * len(options))]

    def number(self, least: int, most: int) -> int:
        """A whole number, both ends included."""
        return least + int(self._random.random() * (most - least + 1))

    def one_in(self, count: int) -> bool:
        """True once in `count` times."""
        return self._random.random() * count < 1

    def some(self, options: Sequence[T], most: int) -> list[T]:
        """One to `most` of them, each as often as it comes."""
        return [self.pick(options) for _ in range(self.number(1, most))]
