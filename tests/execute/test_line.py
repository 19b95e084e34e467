# SPDX-License-Identifier: Apache-2.0
"""Tests of the order in which pieces are drawn and answers are returned."""

from __future__ import annotations

from collections.abc import Iterator

from kvconform.execute.line import Line


def test_answers_come_in_the_order_of_the_pieces() -> None:
    line: Line[str, int] = Line("abcd", most=10)
    line.draw(4)
    numbers = [line.next()[0] for _ in "abcd"]
    for number in (2, 1):
        line.answer(numbers[number], number)
    assert list(line.in_order()) == []
    line.answer(numbers[0], 0)
    assert list(line.in_order()) == [("a", 0), ("b", 1), ("c", 2)]
    assert not line.over
    line.answer(numbers[3], 3)
    assert list(line.in_order()) == [("d", 3)]
    line.draw(1)
    assert line.over


def test_what_is_drawn_and_not_returned_is_limited() -> None:
    line: Line[int, int] = Line(iter(range(100)), most=5)
    line.draw(50)
    assert line.waiting == 5
    taken = [line.next() for _ in range(5)]
    for number, _ in taken[1:]:
        line.answer(number, 0)
    line.draw(50)
    assert line.waiting == 0  # the first piece holds up the others
    line.answer(taken[0][0], 0)
    assert len(list(line.in_order())) == 5
    line.draw(50)
    assert line.waiting == 5


def test_pieces_that_are_put_back_come_first_and_in_order() -> None:
    line: Line[str, int] = Line("abcd", most=10)
    line.draw(4)
    taken = [line.next() for _ in range(3)]
    line.put_back([taken[2][0], taken[0][0]])
    assert [line.next()[1] for _ in range(3)] == ["a", "c", "d"]
    assert line.lost(taken[0][0]) == 1 and line.lost(taken[0][0]) == 2


def test_the_rest_is_what_has_an_answer() -> None:
    line: Line[str, int] = Line("abc", most=10)
    line.draw(3)
    taken = [line.next() for _ in range(3)]
    for number, _ in taken[1:]:
        line.answer(number, number)
    assert list(line.in_order()) == [] and list(line.rest()) == [("b", 1), ("c", 2)]


def seen_at_draw(workers: int, lag: int) -> list[int]:
    """Return how many answers had been used when each of 20 pieces was drawn."""
    used: list[int] = []
    seen: list[int] = []

    def pieces() -> Iterator[int]:
        for number in range(20):
            seen.append(len(used))
            yield number

    line: Line[int, int] = Line(pieces(), most=100, lag=lag)
    while not line.over:
        line.draw(workers)
        batch = [line.next() for _ in range(min(workers, line.waiting))]
        for number, _ in reversed(batch):
            line.answer(number, 0)
        for piece, _ in line.in_order():
            used.append(piece)
    return seen


def test_with_a_lag_pieces_are_drawn_at_the_same_answers_with_any_number_of_workers() -> None:
    assert seen_at_draw(1, 4) == seen_at_draw(3, 4) == [0] * 4 + list(range(1, 17))
