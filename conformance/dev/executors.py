# SPDX-License-Identifier: Apache-2.0
"""Measure what an executor adds to pieces of work: `python -m kvconform.dev.executors`.

Two executors with warm workers take turns, so that the load of the machine affects both alike. A
piece sleeps: it stands for work on a CPU of its own, which this machine need not have. Processor
time is that of all processes of an executor, those of Ray included; a shared one counts for both.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import psutil

from kvconform.errors import KvconformError
from kvconform.execute.choice import executor, parse
from kvconform.execute.executor import Executor
from kvconform.execute.work import Calls


def sleep(seconds: float) -> int:
    """Sleep; return the id of the process."""
    time.sleep(seconds)
    return os.getpid()


@dataclass
class Measured:
    """Rounds of one executor: seconds of wall time, and milliseconds of processor time a piece.

    `driver`: those of this process alone.
    """

    name: str
    workers: Executor[float, int]
    seconds: list[float] = field(default_factory=list)
    driver: list[float] = field(default_factory=list)
    all: list[float] = field(default_factory=list)

    def round(self, pieces: int, piece: float) -> None:
        """Run the pieces, and record what that took."""
        began, own, total = time.perf_counter(), time.process_time(), _spent()
        done = sum(1 for _ in self.workers.run([piece] * pieces))
        assert done == pieces
        self.seconds.append(time.perf_counter() - began)
        self.driver.append(1000 * (time.process_time() - own) / pieces)
        self.all.append(1000 * (_spent() - total) / pieces)

    def line(self, pieces: int, piece: float) -> str:
        """Return the medians of all rounds as a line."""
        ideal = pieces * piece / self.workers.count
        return (
            f"{self.name:<12}{median(self.seconds):8.2f} s a round, the pieces alone {ideal:.2f} s;"
            f" processor time a piece: {median(self.driver):.2f} ms in this process,"
            f" {median(self.all):.2f} ms in all"
        )


def _spent() -> float:
    """Return the processor seconds of this process and all that it has started."""
    total = time.process_time()
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def main(arguments: list[str] | None = None) -> int:
    """Print a line per executor, and the ratio of their times. Return an exit code."""
    parser = argparse.ArgumentParser(prog="kvconform.dev.executors", description=__doc__)
    parser.add_argument("--executor", action="append", help="to compare (default: processes, ray)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--pieces", type=int, default=200, help="in a round (default: 200)")
    parser.add_argument("--ms", type=float, default=50.0, help="of a piece (default: 50)")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    piece = given.ms / 1000
    names = given.executor or ["processes", "ray"]
    try:
        with ExitStack() as stack:
            measured = []
            for name in names:
                work = Calls(sleep, fresh=True)
                workers = executor(parse(name), work, "bench", given.workers)
                measured.append(Measured(name, stack.enter_context(workers)))
            for each in measured:
                each.round(5 * given.workers, piece)  # builds the workers
                each.seconds, each.driver, each.all = [], [], []
            for _ in range(given.rounds):
                for each in measured:
                    each.round(given.pieces, piece)
            print(*(each.line(given.pieces, piece) for each in measured), sep="\n")
            for each in measured[1:]:
                pairs = zip(each.seconds, measured[0].seconds, strict=True)
                ratio = median(one / other for one, other in pairs)
                print(f"{each.name} takes {ratio:.3f} of the time of {measured[0].name}")
    except KvconformError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    # Workers find its functions and classes by the name of the module, which is not `__main__`.
    sys.exit(importlib.import_module("kvconform.dev.executors").main())
