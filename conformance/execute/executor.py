# SPDX-License-Identifier: Apache-2.0
"""The executor: gives pieces to the workers of a crew, and yields their results in order.

What it decides is the same for all crews: how many pieces are in flight, what happens to those of
a worker that is gone, and when a run ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvconform.errors import EnvironmentProblem, KvconformError, one_line
from kvconform.execute.answers import Answer, Death, Loss
from kvconform.execute.crew import Crew, Message
from kvconform.execute.line import Line

P = TypeVar("P")
R = TypeVar("R")

RESTARTS = 200
"""Deaths of workers after which an executor gives up."""
LOSSES = 3
"""Machines that a piece may be lost with; after that its loss counts as a Death."""
AHEAD = 256
"""Pieces per worker that are drawn before the first of them has a result.

A piece that takes long holds up only the results. At 50 ms a piece, this is the time limit of a
hook.
"""


@dataclass
class _Worker:
    """A worker of the crew. `given`: pieces that it has, each with the line that it is of."""

    ready: bool = False
    given: deque[tuple[Line[Any, Any], int]] = field(default_factory=deque)


class Executor(Generic[P, R]):
    """Runs pieces on `count` workers of a crew; a context manager that ends them.

    - `count`: None: as many as make use of all machines.
    - `end`: the time, by time.monotonic, at which pieces that still run are given up.
    - `deaths`: of worker processes. `losses`: of workers that went with their machine.
    """

    def __init__(self, crew: Crew, count: int | None = None, end: float | None = None) -> None:
        self._crew = crew
        self.count = crew.size() if count is None else count
        self.end = end
        self.deaths = 0
        self.losses = 0
        self._workers: dict[str, _Worker] = {}
        self._started = 0

    def __enter__(self) -> Executor[P, R]:
        return self

    def __exit__(self, *exception: object) -> None:
        self._crew.stop([name for name, worker in self._workers.items() if worker.given])
        self._workers.clear()

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.end is not None and time.monotonic() >= self.end

    def run(self, pieces: Iterable[P], lag: int | None = None) -> Iterator[tuple[P, R | Death]]:
        """Yield every piece with its result, in order, whatever the number of workers.

        The result of a piece that took its process down is a Death. A piece whose machine is gone
        runs again. When the time is over, pieces that still run have no result, and none is
        started. Pieces are drawn when a worker is free for them; `lag`: as for Line.

        Raises what a piece raised, when its turn has come; the error with which a worker could not
        be built; EnvironmentProblem for a process that died without a piece, and after RESTARTS.
        """
        if self.over:
            return
        line: Line[P, Any] = Line(pieces, AHEAD * self.count, lag)
        while not self.over:
            self._hand_out(line)
            if line.over:
                return
            for name, message in self._crew.wait(self._left()):
                self._take(name, message)
            for piece, answer in line.in_order():
                yield piece, _opened(answer)
        for piece, answer in line.rest():
            yield piece, _opened(answer)

    def _left(self) -> float | None:
        return None if self.end is None else max(0.0, self.end - time.monotonic())

    def _hand_out(self, line: Line[P, Any]) -> None:
        """Give pieces to all workers with room for them, and start the workers that are missing."""
        ready = [name for name, worker in self._workers.items() if worker.ready]
        missing = self.count - len(ready)
        room = sum(self._crew.depth - len(self._workers[name].given) for name in ready)
        line.draw(room + missing)
        # The first piece of each worker before any second one.
        for depth in range(self._crew.depth):
            for name in ready:
                worker = self._workers[name]
                if len(worker.given) == depth and line.waiting:
                    number, piece = line.next()
                    worker.given.append((line, number))
                    self._crew.give(name, piece)
        starting = len(self._workers) - len(ready)
        for _ in range(min(line.waiting, missing) - starting):
            self._started += 1
            name = f"worker{self._started}"
            self._workers[name] = _Worker()
            self._crew.start(name)

    def _take(self, name: str, message: Message) -> None:
        """Take a message of a worker. Raises the error with which it could not be built."""
        worker = self._workers[name]
        if isinstance(message, Loss):
            self._lose(name, message)
        elif isinstance(message, Death):
            self._bury(name, message)
        elif message.kind == "ready":
            worker.ready = True
        elif message.kind == "refused":
            del self._workers[name]
            if isinstance(message.value, KvconformError):
                raise message.value
            raise EnvironmentProblem(f"no worker can be started: {one_line(message.value)}")
        else:
            line, number = worker.given.popleft()
            line.answer(number, message)

    def _bury(self, name: str, death: Death) -> None:
        """Store the death of a process as the result of its piece."""
        worker = self._workers[name]
        self.deaths += 1
        if not worker.given:
            raise EnvironmentProblem(f"a worker process ended outside of its work {death}")
        if self.deaths > RESTARTS:
            raise EnvironmentProblem(
                f"more than {RESTARTS} worker processes ended, the last {death}"
            )
        line, number = worker.given.popleft()
        line.answer(number, death)
        if not self._crew.survives(name):
            self._remove(name)

    def _lose(self, name: str, loss: Loss) -> None:
        """Have the pieces of a worker that went with its machine run again."""
        self.losses += 1
        if self.losses > RESTARTS:
            raise EnvironmentProblem(f"more than {RESTARTS} workers were lost: {loss.why}")
        given = self._workers[name].given
        if given:
            line, number = given[0]  # the others had not begun
            if line.lost(number) > LOSSES:
                given.popleft()
                line.answer(number, Death(None, where=loss.why))
        self._remove(name)

    def _remove(self, name: str) -> None:
        for line, number in reversed(self._workers.pop(name).given):
            line.put_back([number])


def _opened(answer: Answer | Death) -> Any:
    """Return the result in an answer. Raises what the piece raised."""
    if isinstance(answer, Death):
        return answer
    if answer.kind == "raised":
        raise answer.value
    return answer.value
