# SPDX-License-Identifier: Apache-2.0
"""Functions that workers call in tests of executors; importable in other processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.execute.work import Place

Piece = tuple[str, float]
"""What to do, and a number."""


class Unpicklable(Exception):
    """Cannot be unpickled, because its class takes two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def do(piece: Piece) -> object:
    """Do a piece of work; `twice` returns the double of the number, `node` a process of Ray."""
    what, number = piece
    deeds: dict[str, Callable[[], object]] = {
        "twice": lambda: 2 * number,
        "sleep": lambda: time.sleep(number) or number,
        "exit": lambda: os._exit(int(number)),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "process": os.getpid,
        "node": lambda: time.sleep(number) or psutil.Process(os.getppid()).ppid(),
        "end-actor": lambda: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(60),
        "lambda": lambda: lambda: number,
    }
    if what == "refuse":
        raise UsageError(f"no {number:g}")
    if what == "wrong":
        raise ZeroDivisionError(f"wrong {number:g}")
    if what == "odd":
        raise Unpicklable("o", "dd")
    return deeds[what]()


@dataclass(frozen=True)
class Built:
    """Work whose workers are built once and count their pieces; `problem`: they cannot be built."""

    problem: str = ""
    folders: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    gpus: int = 0
    fresh: bool = True

    @contextmanager
    def worker(self, place: Place) -> Iterator[Callable[[Piece], object]]:
        if self.problem == "exit":
            os._exit(7)
        if self.problem:
            raise EnvironmentProblem(self.problem)
        count = 0

        def run(piece: Piece) -> object:
            nonlocal count
            count += 1
            return count, do(piece)

        yield run
