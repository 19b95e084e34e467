# SPDX-License-Identifier: Apache-2.0
"""A worker process of this machine: its body, and its handle in the process that started it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from kvconform.execute.answers import Answer, Death, death_of, packed
from kvconform.execute.work import Place, Work
from kvconform.process.forking import forked_after_import
from kvconform.process.watchdog import HookTimeout

FAILURES = (Exception, SystemExit, HookTimeout)
"""What a piece, or the building of a worker, may raise."""


def answer_of(run: Callable[[Any], Any], piece: Any) -> Answer:
    """Run a piece, and return its result or what it raised."""
    try:
        return Answer("result", run(piece))
    except FAILURES as error:
        return Answer("raised", error)


def serve(connection: Connection, work: bytes, place: Place) -> None:
    """Build a worker, and run the pieces from a connection; the body of a worker process.

    `work`: a pickled Work. Sends packed answers. Ends when None arrives, when the other end is
    closed, or when no worker can be built.
    """
    sys.path += [copy for _, copy in place.copies]  # for the modules that `work` names
    try:
        described: Work[Any, Any] = pickle.loads(work)
        with described.worker(place) as run:
            connection.send_bytes(packed(Answer("ready")))
            while (piece := pickle.loads(connection.recv_bytes())) is not None:
                connection.send_bytes(packed(answer_of(run, piece)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the process that started this one has ended, or is ending
    except FAILURES as error:
        connection.send_bytes(packed(Answer("refused", error)))


class Process:
    """A worker process. `fresh`: as for Work."""

    def __init__(self, work: bytes, fresh: bool, place: Place) -> None:
        context = get_context("spawn") if fresh else forked_after_import()
        self.place = place
        self._connection, theirs = context.Pipe()
        self._process: Any = context.Process(
            target=serve, args=(theirs, work, place), name=place.name
        )
        self._process.start()
        theirs.close()

    @property
    def ends(self) -> tuple[Connection, int]:
        """What multiprocessing.connection.wait can wait for: a message, and the process's end."""
        return self._connection, self._process.sentinel

    def give(self, piece: bytes) -> None:
        """Send a pickled piece. If the process has ended, `take` reports it."""
        with suppress(OSError):
            self._connection.send_bytes(piece)

    def take(self) -> bytes | Death | None:
        """Return a packed answer; None if there is none yet. A Death ends the handle's life."""
        try:
            if self._connection.poll():
                return self._connection.recv_bytes()
            if self._process.is_alive():
                return None
        except (EOFError, OSError):
            pass
        self._process.join()
        self._connection.close()
        return death_of(self.place, self._process.exitcode)

    def dismiss(self) -> None:
        """Ask the process to end after its pieces; `end` waits for it."""
        with suppress(OSError):
            self._connection.send_bytes(pickle.dumps(None))

    def end(self, patience: float) -> None:
        """End the process: wait `patience` seconds, then terminate it, then kill it."""
        self._process.join(patience)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()
