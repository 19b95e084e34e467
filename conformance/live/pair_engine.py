# SPDX-License-Identifier: Apache-2.0
"""The parent's end of one engine of a pair: starts it, talks to it over a socket, and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from kvconform.live import process
from kvconform.live.job import Answer, Ask, Counts, Job
from kvconform.process.supervisor import LEFT

EXIT_LIMIT = 60.0
"""Seconds that a process may take to end once its engine was shut down."""


class EngineGone(RuntimeError):
    """The engine's process ended, or did not answer in time; the message says which."""


@dataclass
class Said:
    """Everything that the engine has sent so far."""

    answers: dict[str, tuple[Answer, dict[str, Any] | None]] = field(default_factory=dict)
    counts: list[Counts] = field(default_factory=list)
    resets: list[bool] = field(default_factory=list)
    error: tuple[str, str, str] | None = None
    up: bool = False
    ended: bool = False


class PairEngine:
    """One engine of a pair, in a process of its own under a supervisor.

    `name`: the engine's name in the trace. `environment`: the child's complete environment. After
    `end`, nothing of the child is left.
    """

    def __init__(self, name: str, job: Job, tmp: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.tmp = tmp
        self.said = Said()
        self.mark = uuid.uuid4().hex
        self.log = tmp / "log"
        (tmp / "work").mkdir(parents=True, exist_ok=True)
        job.write(tmp / "job.json")
        self._left = tmp / "left.json"
        self._folder = tempfile.mkdtemp(prefix="kvc-")  # a socket's path has 108 bytes at most
        address = os.path.join(self._folder, "link")
        self._listener = Listener(address, "AF_UNIX")
        command = process.python("kvconform.live.pair_child", str(tmp / "job.json"), address)
        with self.log.open("ab") as output:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "kvconform.process.supervisor", "10", *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=tmp / "work",
                env={**environment, process.MARK: self.mark, LEFT: str(self._left)},
                start_new_session=True,
            )
        self._link: Connection | None = None

    # -- messages from the engine
    def wait(self, ready: Callable[[Said], bool], limit: float) -> None:
        """Receive messages until `ready`.

        Raises EngineGone if the engine ends before that, or takes longer than `limit` seconds.
        """
        until = time.monotonic() + limit
        while True:
            self.listen()
            if ready(self.said):
                return
            if self.said.error is not None:
                raise EngineGone(f"engine {self.name} ended with an error: {self.said.error[1]}")
            if self._guard.poll() is not None:
                raise EngineGone(f"the process of engine {self.name} died")
            if time.monotonic() > until:
                raise EngineGone(f"engine {self.name} did not answer within {limit:g} s")

    def listen(self, patience: float = 0.02) -> None:
        """Receive the messages that have arrived; wait `patience` seconds for the first."""
        if self._link is None:
            self._accept(patience)
            return
        with contextlib.suppress(EOFError, OSError):
            while self._link.poll(patience):
                what, *rest = self._link.recv()
                self._take(what, rest)
                patience = 0

    def _accept(self, patience: float) -> None:
        """Accept the child's connection if it comes within `patience` seconds."""
        accepting: Any = self._listener._listener._socket  # type: ignore[attr-defined]
        accepting.settimeout(patience)
        with contextlib.suppress(TimeoutError):
            self._link = self._listener.accept()

    def _take(self, what: str, rest: list[Any]) -> None:
        """Keep a message of the child (kvconform.live.pair_child)."""
        if what == "up":
            self.said.up = True
        elif what == "answer":
            answer = Answer.model_validate(rest[0])
            self.said.answers[answer.id] = answer, rest[1]
        elif what == "counts":
            self.said.counts.append(Counts.model_validate(rest[0]))
        elif what == "reset":
            self.said.resets.append(rest[0])
        elif what == "error":
            self.said.error = tuple(rest)  # type: ignore[assignment]
        else:
            self.said.ended = True

    # -- requests to the engine
    def send(self, *message: Any) -> None:
        """Send a message. EngineGone if the engine is not connected."""
        try:
            assert self._link is not None
            self._link.send(message)
        except (OSError, AssertionError) as error:
            raise EngineGone(f"engine {self.name} cannot be reached: {error}") from None

    def ask(self, ask: Ask, transfer: dict[str, Any] | None = None) -> None:
        """Send a request, whose answer `answer` waits for."""
        self.send("ask", ask.model_dump(), transfer)

    def answer(self, name: str, limit: float) -> tuple[Answer, dict[str, Any] | None]:
        """Wait for the answer of a request, and its kv_transfer_params. EngineGone as `wait`."""
        self.wait(lambda said: name in said.answers, limit)
        return self.said.answers[name]

    def counts(self, limit: float = 30) -> Counts:
        """Return by how much vLLM's counters have grown since the last call."""
        before = len(self.said.counts)
        self.send("counts")
        self.wait(lambda said: len(said.counts) > before, limit)
        return self.said.counts[-1]

    def reset(self, limit: float = 60) -> bool:
        """Empty the local prefix cache; return whether vLLM could."""
        before = len(self.said.resets)
        self.send("reset")
        self.wait(lambda said: len(said.resets) > before, limit)
        return self.said.resets[-1]

    # -- the end
    def kill(self) -> None:
        """Kill the engine's processes at once, as a fault."""
        process.end(self.mark)
        self._guard.wait(30)

    def end(self, limit: float = 30) -> process.Ended:
        """Shut the engine down, end what is left of it, and return how it ended.

        `limit`: seconds that the shutdown may take.
        """
        with contextlib.suppress(EngineGone):
            if self.said.error is None and self._guard.poll() is None:
                self.send("stop")
                self.wait(lambda said: said.ended, limit)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(EXIT_LIMIT if self.said.ended or self.said.error else 0.1)
        if self._guard.poll() is None:
            how = "timeout"
        else:
            how = "exit" if self.said.ended else "signal"
        found = process.Ended(how, self._guard.returncode or 0, 0.0)
        if how == "exit" and self._left.is_file():
            left = json.loads(self._left.read_text(encoding="utf-8"))
            found.processes = left["processes"]
            found.ports = left["ports"]
            found.files = left["files"]
            for path in found.files:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        found.stuck = process.end(self.mark)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait(20)
        if self._link is not None:
            self._link.close()
        self._listener.close()
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)
        return found
