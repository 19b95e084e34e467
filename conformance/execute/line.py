# SPDX-License-Identifier: Apache-2.0
"""The pieces of one run, from the iterable that they come from until their answers are used."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

P = TypeVar("P")
A = TypeVar("A")


class Line(Generic[P, A]):
    """Numbers pieces, and returns their answers in the order of the pieces.

    - `most`: pieces that are drawn and not yet returned, at most: what is kept in memory.
    - `lag`: if given, a piece is drawn right after the answer that is `lag` pieces before it was
      returned, neither sooner nor later. Pieces that depend on answers are then the same with any
      number of workers.
    """

    def __init__(self, pieces: Iterable[P], most: int, lag: int | None = None) -> None:
        self._source = iter(pieces)
        self._most, self._lag = most, lag
        self._pieces: dict[int, P] = {}
        self._answers: dict[int, A] = {}
        self._waiting: deque[int] = deque()
        self._lost: Counter[int] = Counter()
        self._drawn = 0
        self._following = 0
        self._ended = False
        self._steady()

    @property
    def over(self) -> bool:
        """Whether all pieces have been returned with their answers."""
        return self._ended and not self._pieces

    @property
    def waiting(self) -> int:
        """The number of pieces that are drawn and not given to a worker."""
        return len(self._waiting)

    def draw(self, room: int) -> None:
        """Draw pieces until `room` of them wait, or the limits of this line are reached."""
        if self._lag is None:
            while len(self._waiting) < room and len(self._pieces) < self._most:
                if not self._draw():
                    return

    def _steady(self) -> None:
        """Draw the pieces that are due, if a lag is given."""
        while self._lag is not None and self._drawn < self._following + self._lag:
            if not self._draw():
                return

    def _draw(self) -> bool:
        if self._ended:
            return False
        try:
            piece = next(self._source)
        except StopIteration:
            self._ended = True
            return False
        self._pieces[self._drawn] = piece
        self._waiting.append(self._drawn)
        self._drawn += 1
        return True

    def next(self) -> tuple[int, P]:
        """Return the first piece that waits, with its number."""
        number = self._waiting.popleft()
        return number, self._pieces[number]

    def put_back(self, numbers: Iterable[int]) -> None:
        """Have pieces wait again, before all others: their worker is gone."""
        self._waiting.extendleft(sorted(numbers, reverse=True))

    def lost(self, number: int) -> int:
        """Count that a piece was lost with its worker's machine; return how often it was."""
        self._lost[number] += 1
        return self._lost[number]

    def answer(self, number: int, answer: A) -> None:
        """Store the answer of a piece."""
        self._answers[number] = answer

    def in_order(self) -> Iterator[tuple[P, A]]:
        """Yield the pieces whose turn it is, with their answers."""
        while self._following in self._answers:
            number = self._following
            self._following += 1
            answer = self._answers.pop(number)
            yield self._pieces.pop(number), answer
            self._steady()

    def rest(self) -> Iterator[tuple[P, A]]:
        """Yield all other pieces that have answers, in order; those between them are given up."""
        for number in sorted(self._answers):
            yield self._pieces.pop(number), self._answers.pop(number)
