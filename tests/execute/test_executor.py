# SPDX-License-Identifier: Apache-2.0
"""Tests of the executor's decisions, on a crew that does what a test says."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.execute.answers import Answer, Death, Loss
from kvconform.execute.crew import Message
from kvconform.execute.executor import AHEAD, LOSSES, RESTARTS, Executor


class Fake:
    """A crew of which one worker answers when `wait` is called: twice the last, then the first.

    `answer(name, piece)`: the message about a piece. `heirs`: a worker survives a death.
    """

    def __init__(
        self, answer: Callable[[str, Any], Message], depth: int = 1, heirs: bool = False
    ) -> None:
        self.depth, self.heirs = depth, heirs
        self.answer = answer
        self.given: dict[str, deque[Any]] = {}
        self.starting: list[str] = []
        self.most = self.waits = 0
        self.stopped: Collection[str] | None = None

    def size(self) -> int:
        return 3

    def start(self, name: str) -> None:
        self.given[name] = deque()
        self.starting.append(name)

    def give(self, name: str, piece: object) -> None:
        self.given[name].append(piece)
        self.most = max(self.most, len(self.given[name]))

    def wait(self, seconds: float | None) -> list[tuple[str, Message]]:
        if self.starting:
            return [(self.starting.pop(), Answer("ready"))]
        self.waits += 1
        for name in reversed(self.given) if self.waits % 3 else list(self.given):
            if self.given[name]:
                message = self.answer(name, self.given[name].popleft())
                if isinstance(message, Loss) or (isinstance(message, Death) and not self.heirs):
                    del self.given[name]
                return [(name, message)]
        raise AssertionError("the executor waits, and no worker has anything to do")

    def survives(self, name: str) -> bool:
        return name in self.given

    def stop(self, busy: Collection[str]) -> None:
        self.stopped = busy


def doubled(name: str, piece: int) -> Message:
    return Answer("result", 2 * piece)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("depth", [1, 2])
def test_results_are_in_order_with_any_number_of_workers(count: int, depth: int) -> None:
    crew = Fake(doubled, depth)
    with Executor[int, int](crew, count) as workers:
        assert list(workers.run(range(50))) == [(each, 2 * each) for each in range(50)]
    assert crew.most == depth and len(crew.given) == count and crew.stopped == []


def test_no_more_workers_are_started_than_pieces_need() -> None:
    crew = Fake(doubled)
    with Executor[int, int](crew) as workers:
        assert workers.count == 3
        assert list(workers.run([4])) == [(4, 8)]
        assert len(crew.given) == 1
        assert len(list(workers.run([5, 6]))) == 2  # two that were not there together before
        assert len(crew.given) == 2


def test_pieces_are_drawn_when_they_are_needed() -> None:
    drawn = 0

    def endless() -> Iterator[int]:
        nonlocal drawn
        while True:
            drawn += 1
            yield drawn

    with Executor[int, int](Fake(doubled, depth=2), 1) as workers:
        done = workers.run(endless())
        for _ in range(100):
            next(done)
        assert drawn <= 103


def test_a_slow_piece_holds_up_a_limited_number_of_results() -> None:
    def answer(name: str, piece: int) -> Message:
        return Answer("result", piece)

    crew = Fake(answer)
    taken = 0

    def pieces() -> Iterator[int]:
        nonlocal taken
        for number in range(10 * AHEAD):
            taken += 1
            yield number

    with Executor[int, int](crew, 2) as workers:
        done = workers.run(pieces())
        first = crew.give
        held: list[tuple[str, object]] = []

        def give(name: str, piece: object) -> None:
            if piece == 0:
                held.append((name, piece))  # this worker never answers
            else:
                first(name, piece)

        crew.give = give  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match="no worker has anything to do"):
            next(done)
    assert held and taken == 2 * AHEAD


def test_a_death_is_the_result_of_its_piece_alone() -> None:
    def answer(name: str, piece: int) -> Message:
        return Death(9) if piece % 10 == 3 else Answer("result", piece)

    for heirs in (False, True):
        crew = Fake(answer, depth=2, heirs=heirs)
        with Executor[int, int](crew, 2) as workers:
            found = [result for _, result in workers.run(range(20))]
        assert [isinstance(each, Death) for each in found] == [n % 10 == 3 for n in range(20)]
        assert workers.deaths == 2 and (len(crew.given) == 2 or not heirs)


def test_pieces_of_a_lost_machine_run_again() -> None:
    losses = 0

    def answer(name: str, piece: int) -> Message:
        nonlocal losses
        if piece == 5 and losses < LOSSES:
            losses += 1
            return Loss("its node is gone")
        return Answer("result", piece)

    with Executor[int, int](Fake(answer, depth=2), 3) as workers:
        assert list(workers.run(range(30))) == [(each, each) for each in range(30)]
    assert workers.losses == LOSSES and workers.deaths == 0


def test_a_piece_that_takes_every_machine_down_is_given_up() -> None:
    def answer(name: str, piece: int) -> Message:
        return Loss("its node is gone") if piece == 5 else Answer("result", piece)

    with Executor[int, int](Fake(answer), 2) as workers:
        found = dict(workers.run(range(8)))
    assert found.pop(5) == Death(None, where="its node is gone")
    assert found == {each: each for each in range(8) if each != 5}
    assert workers.losses == LOSSES + 1


def test_it_gives_up_after_many_deaths_and_on_one_without_a_piece() -> None:
    with (
        Executor[int, int](Fake(lambda *_: Death(1, printed="the end of the log")), 2) as workers,
        pytest.raises(EnvironmentProblem, match=f"more than {RESTARTS} worker processes ended"),
    ):
        list(workers.run(range(1000)))
    crew = Fake(doubled)
    with Executor[int, int](crew, 1) as workers:
        list(workers.run([1]))
        crew.wait = lambda _: [("worker1", Death(3, printed="why"))]  # type: ignore[method-assign]
        crew.give = lambda *_: None  # type: ignore[method-assign]
        workers._workers["worker1"].ready = False
        with pytest.raises(EnvironmentProblem, match=r"outside of its work \(exit code 3\):\nwhy"):
            list(workers.run([1]))


def test_what_a_piece_raised_comes_when_its_turn_has_come() -> None:
    def answer(name: str, piece: int) -> Message:
        return Answer("raised", UsageError("no 3")) if piece == 3 else Answer("result", piece)

    with Executor[int, int](Fake(answer), 3) as workers:
        done = workers.run(range(9))
        found = [next(done) for _ in range(3)]
        with pytest.raises(UsageError, match="^no 3$"):
            next(done)
    assert found == [(0, 0), (1, 1), (2, 2)]


def test_answers_to_a_run_that_was_left_are_no_answers_to_the_next() -> None:
    with Executor[int, int](Fake(doubled, depth=2), 2) as workers:
        for piece, _ in workers.run(range(100)):
            if piece == 3:
                break
        assert list(workers.run(range(1000, 1010))) == [(n, 2 * n) for n in range(1000, 1010)]


def test_when_the_time_is_over_the_rest_is_given_up() -> None:
    crew = Fake(doubled, depth=1)
    with Executor[int, int](crew, 2, end=time.monotonic() + 3600) as workers:
        found = []
        for piece, _ in workers.run(range(100)):
            found.append(piece)
            if piece >= 10:
                workers.end = time.monotonic()
    assert workers.over and 11 <= len(found) < 20
    assert crew.stopped  # those that still had a piece
    with Executor[int, int](Fake(doubled), 1, end=time.monotonic()) as workers:
        assert list(workers.run([1])) == []
