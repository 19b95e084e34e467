# SPDX-License-Identifier: Apache-2.0
"""Deterministic source of random draws.

It replaces Hypothesis, which took longer to draw a workload than the workload took to run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """Random draws that depend only on the seed, on every machine."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(f"kvconform/{seed}")

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options; one that is listed twice is picked twice as often."""
        return options[int(self._random.random() * len(options))]

    def number(self, least: int, most: int) -> int:
        """Return a whole number, both ends included."""
        return least + int(self._random.random() * (most - least + 1))

    def one_in(self, count: int) -> bool:
        """Return True once in `count` times."""
        return self._random.random() * count < 1

    def some(self, options: Sequence[T], most: int) -> list[T]:
        """Return one to `most` options, which may repeat."""
        return [self.pick(options) for _ in range(self.number(1, most))]
