# SPDX-License-Identifier: Apache-2.0
"""The body of a Ray actor: it keeps one worker process on its node, and passes pieces to it.

The connector runs in that process, never in the actor's own, which has threads of Ray and must not
be forked. A connector that ends its process leaves the actor alive: it reports the death with the
note of the process, and starts another one. So an actor dies with its node, as a rule.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType

from kvconform.errors import EnvironmentProblem
from kvconform.execute.answers import Answer, Death, packed
from kvconform.execute.luggage import copies
from kvconform.execute.nodes import Node, difference, look
from kvconform.execute.process import Process
from kvconform.execute.work import Place
from kvconform.files import scratch_root
from kvconform.process import scratch


@dataclass(frozen=True)
class Order:
    """What an actor needs to know: a pickled Work, and `fresh` and `folders` of it.

    `here`: what the caller's machine has. `patience`: seconds that the process has to end.
    """

    work: bytes
    fresh: bool
    folders: tuple[str, ...]
    here: Node
    patience: float


READY = packed(Answer("ready"))


class Keeper:
    """The actor. Methods return packed answers, or a Death."""

    def __init__(self, order: Order, name: str) -> None:
        self._order, self._name = order, name
        scratch.remove_abandoned()
        self._scratch = scratch.make("worker", scratch_root())
        self._started = 0
        self._process: Process | None = None
        self._ready = False

    def __repr__(self) -> str:
        return self._name

    def start(self) -> tuple[str, bytes | Death]:
        """Start the process; return the node's id, and the answer of the process or its death."""
        import ray

        return ray.get_runtime_context().get_node_id(), self._first()

    def _first(self) -> bytes | Death:
        host = os.uname().nodename
        differs = difference(self._order.here, host, look())
        if differs is not None:  # a node that has joined the cluster since the others were checked
            return packed(Answer("refused", EnvironmentProblem(differs)))
        self._start()
        return self._begin()

    def run(self, piece: bytes) -> bytes | Death:
        """Run a piece, and return its answer. After a death another process is started."""
        if not self._ready:
            started = self._begin()
            if started != READY:
                return started
        assert self._process is not None
        self._process.give(piece)
        answer = self._next()
        if isinstance(answer, Death):
            self._ready = False
            self._start()  # it gets ready while the answer travels
        return answer

    def stop(self) -> None:
        """End the process, and remove its files."""
        if self._process is not None:
            self._process.dismiss()
            self._process.end(self._order.patience)
        scratch.discard(self._scratch)

    def _start(self) -> None:
        self._started += 1
        name = f"process{self._started}"
        place = Place(self._scratch, name, copies=copies(self._order.folders))
        with _without_main():
            self._process = Process(self._order.work, self._order.fresh, place)

    def _begin(self) -> bytes | Death:
        """Wait for the first answer of the process."""
        answer = self._next()
        self._ready = answer == READY
        return answer

    def _next(self) -> bytes | Death:
        """Wait for an answer or the death of the process."""
        assert self._process is not None
        while True:
            multiprocessing.connection.wait(self._process.ends)
            answer = self._process.take()
            if isinstance(answer, Death):
                self._process = None
                return replace(answer, where=os.uname().nodename)
            if answer is not None:
                return answer


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module, which is Ray's: a new process would import it, and Ray with it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
