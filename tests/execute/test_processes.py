# SPDX-License-Identifier: Apache-2.0
"""Tests of workers in this process, and in processes of this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.execute.answers import Death
from kvconform.execute.choice import LOCAL, Choice, executor
from kvconform.execute.crew import Here, Processes
from kvconform.execute.executor import Executor
from kvconform.execute.work import Calls
from pieces import Built, Piece, do

RIGS = (str(Path(__file__).parents[1] / "rigs"),)


def test_here_is_this_process(tmp_path: Path) -> None:
    pieces: list[Piece] = [("process", 0), ("twice", 4)]
    with Executor[Piece, object](Here(Built(), tmp_path)) as workers:
        assert [found for _, found in workers.run(pieces)] == [(1, os.getpid()), (2, 8)]
        with pytest.raises(ZeroDivisionError, match="wrong 2"):
            list(workers.run([("wrong", 2)]))
    with (
        pytest.raises(EnvironmentProblem, match="^no room$"),
        Executor[Piece, object](Here(Built("no room"), tmp_path)) as workers,
    ):
        list(workers.run(pieces))


def test_processes_run_pieces_and_survive_them() -> None:
    pieces: list[Piece] = [
        ("twice", 1),
        ("exit", 5),
        ("twice", 2),
        ("kill", 0),
        ("lambda", 3),
    ]
    with executor(LOCAL, Calls(do, folders=RIGS, fresh=True), "test", 2) as workers:
        done = workers.run(pieces)
        found = [next(done)[1] for _ in pieces[:4]]
        assert found == [2, Death(5), 4, Death(-9)] and workers.deaths == 2
        with pytest.raises(EnvironmentProblem, match="a result is lost: "):
            next(done)
        for piece, kind, said in (
            (("refuse", 3.0), UsageError, "^no 3$"),
            (("wrong", 3.0), ZeroDivisionError, r"^wrong 3\n(.|\n)*, in do\n"),
            (("odd", 0.0), EnvironmentProblem, "a worker failed: Unpicklable: odd"),
        ):
            with pytest.raises(kind, match=said):
                list(workers.run([piece]))
        [(_, one), (_, two)] = workers.run([("process", 0), ("process", 0)])
        assert os.getpid() not in (one, two)


def test_a_worker_is_built_once(tmp_path: Path) -> None:
    pieces: list[Piece] = [("twice", 1)] * 3
    with Executor[Piece, object](Processes(Built(), tmp_path), 1) as workers:
        assert [found for _, found in workers.run(pieces)] == [(1, 2), (2, 2), (3, 2)]
    for problem, said in (("no room", "^no room$"), ("exit", r"outside of its work \(exit code 7")):
        with (
            pytest.raises(EnvironmentProblem, match=said),
            Executor[Piece, object](Processes(Built(problem), tmp_path), 1) as workers,
        ):
            list(workers.run(pieces))


class UntilFourAreDone(Executor[Piece, object]):
    """Its time is over as soon as four pieces have their results."""

    done = 0

    def _take(self, name: str, message: Any) -> None:
        worker = self._workers[name]
        before = len(worker.given)
        super()._take(name, message)
        self.done += before - len(worker.given)
        if self.done == 4:
            self.end = time.monotonic()


def test_what_runs_at_the_end_is_given_up(tmp_path: Path) -> None:
    began = time.monotonic()
    with UntilFourAreDone(Processes(Built(), tmp_path), 2) as workers:
        assert len(list(workers.run([("twice", 1)] * 2))) == 2  # both have started
        found = list(workers.run([("sleep", 60), ("twice", 2), ("twice", 3)]))
    assert [piece for piece, _ in found] == [("twice", 2), ("twice", 3)]
    assert time.monotonic() - began < 50


def test_the_number_of_workers() -> None:
    assert LOCAL.workers(3, 2) == 3 and LOCAL.workers(None, 2) == 2
    assert Choice("ray").workers(3, 2) == 3 and Choice("ray").workers(None, 2) is None
