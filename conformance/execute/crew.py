# SPDX-License-Identifier: Apache-2.0
"""Crews: workers in this process, and in processes of this machine."""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from kvconform.execute.answers import Answer, Death, Loss, unpacked
from kvconform.execute.process import FAILURES, Process, answer_of
from kvconform.execute.work import Place, Work

STOP_LIMIT = 60.0
"""Seconds that an idle worker has to stop its servers and end."""
Message = Answer | Death | Loss


class Crew(Protocol):
    """Workers by name, each of which runs its pieces in the order in which it was given them.

    A worker is gone after a Death, a Loss or an answer `refused`, unless `survives` says that
    another process has taken its place.
    """

    depth: int
    """Pieces that a worker may have at a time, so that it does not wait for the next."""

    def size(self) -> int:
        """Return the number of workers that make use of all of the machines."""

    def start(self, name: str) -> None:
        """Start a worker, whose first message is `ready` or `refused`."""

    def give(self, name: str, piece: object) -> None:
        """Give a piece to a worker."""

    def wait(self, seconds: float | None) -> list[tuple[str, Message]]:
        """Return the messages of workers; wait for one, but at most `seconds`."""

    def survives(self, name: str) -> bool:
        """Return whether a worker goes on after the Death that it reported."""

    def stop(self, busy: Collection[str]) -> None:
        """End all workers: those in `busy` and those that are not built at once."""


class Here:
    """One worker in this process, which a piece can take down with it."""

    depth = 1

    def __init__(self, work: Work[Any, Any], scratch: Path) -> None:
        self._work, self._scratch = work, scratch
        self._stack = ExitStack()
        self._run: Callable[[Any], Any] | None = None
        self._waiting: list[tuple[str, object]] = []
        self._started: list[str] = []

    def size(self) -> int:
        """Return 1."""
        return 1

    def start(self, name: str) -> None:
        """Start the worker; `wait` builds it."""
        self._started.append(name)

    def give(self, name: str, piece: object) -> None:
        """Give a piece to the worker; `wait` runs it."""
        self._waiting.append((name, piece))

    def wait(self, seconds: float | None) -> list[tuple[str, Message]]:
        """Build the worker, or run one piece. The time limit is that of the piece alone."""
        found: list[tuple[str, Message]] = []
        if self._started:
            found.append((name := self._started.pop(), self._build(name)))
        elif self._waiting and self._run is not None:
            name, piece = self._waiting.pop(0)
            found.append((name, answer_of(self._run, piece)))
        return found

    def _build(self, name: str) -> Answer:
        place = Place(self._scratch, name, own=False)
        try:
            self._run = self._stack.enter_context(self._work.worker(place))
        except FAILURES as error:
            return Answer("refused", error)
        return Answer("ready")

    def survives(self, name: str) -> bool:
        """Return False."""
        return False

    def stop(self, busy: Collection[str]) -> None:
        """Tear the worker down."""
        self._stack.close()


class Processes:
    """Workers in processes of this machine, with temporary files in `scratch`."""

    depth = 1

    def __init__(self, work: Work[Any, Any], scratch: Path) -> None:
        self._work, self._fresh = pickle.dumps(work), work.fresh
        self._scratch = scratch
        self._workers: dict[str, Process] = {}
        self._built: set[str] = set()

    def size(self) -> int:
        """Return the number of CPUs that this process may use."""
        return len(os.sched_getaffinity(0))

    def start(self, name: str) -> None:
        """Start a process."""
        self._workers[name] = Process(self._work, self._fresh, Place(self._scratch, name))

    def give(self, name: str, piece: object) -> None:
        """Pickle a piece and send it."""
        self._workers[name].give(pickle.dumps(piece))

    def wait(self, seconds: float | None) -> list[tuple[str, Message]]:
        """Return the messages of workers; wait for one, but at most `seconds`."""
        ends: dict[Any, str] = {}
        for name, worker in self._workers.items():
            ends.update(dict.fromkeys(worker.ends, name))
        ready = multiprocessing.connection.wait(list(ends), seconds)
        found: list[tuple[str, Message]] = []
        for name in dict.fromkeys(ends[end] for end in ready):
            message = self._workers[name].take()
            if isinstance(message, Death):
                del self._workers[name]
                found.append((name, message))
            elif message is not None:
                answer = unpacked(message)
                if answer.kind == "ready":
                    self._built.add(name)
                found.append((name, answer))
        return found

    def survives(self, name: str) -> bool:
        """Return False."""
        return False

    def stop(self, busy: Collection[str]) -> None:
        """End all processes; an idle one has STOP_LIMIT seconds for it."""
        idle = self._built - set(busy)
        for name in idle & set(self._workers):
            self._workers[name].dismiss()
        for name, worker in self._workers.items():
            worker.end(STOP_LIMIT if name in idle else 0)
        self._workers.clear()
