# SPDX-License-Identifier: Apache-2.0
"""The parent's end of one engine of a pair: started under a guard, asked over a socket, killed as a fault, and gone at the end."""

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
    """The engine's process ended, or did not answer in time; the text says which."""


@dataclass
class Said:
    """What the engine has said and nobody has asked for yet."""

    answers: dict[str, tuple[Answer, dict[str, Any] | None]] = field(default_factory=dict)
    counts: list[Counts] = field(default_factory=list)
    resets: list[bool] = field(default_factory=list)
    error: tuple[str, str, str] | None = None
    up: bool = False
    ended: bool = False


class PairEngine:
    """`name` is the engine's in the trace. `environment` is the child's whole one. Nothing of the child is left after `end`."""

    def __init__(self, name: str, job: Job, tmp: Path, environment: dict[str, str]) -> None:
        self.name, self.tmp, self.said = name, tmp, Said()
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

    # -- what it says ----------------------------------------------------------------------------------------------------------
    def wait(self, ready: Callable[[Said], bool], limit: float) -> None:
        """Until it has said something. EngineGone if it ends before that, or takes longer than `limit` seconds."""
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
        """Take what has arrived."""
        if self._link is None:
            self._accept(patience)
            return
        with contextlib.suppress(EOFError, OSError):
            while self._link.poll(patience):
                what, *rest = self._link.recv()
                self._take(what, rest)
                patience = 0

    def _accept(self, patience: float) -> None:
        accepting: Any = self._listener._listener._socket  # type: ignore[attr-defined]
        accepting.settimeout(patience)
        with contextlib.suppress(TimeoutError):
            self._link = self._listener.accept()
            return

    def _take(self, what: str, rest: list[Any]) -> None:
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

    # -- what it is asked ------------------------------------------------------------------------------------------------------
    def send(self, *message: Any) -> None:
        """EngineGone if nobody is there."""
        try:
            assert self._link is not None
            self._link.send(message)
        except (OSError, AssertionError) as error:
            raise EngineGone(f"engine {self.name} cannot be reached: {error}") from None

    def ask(self, ask: Ask, transfer: dict[str, Any] | None = None) -> None:
        """A request; its answer is waited for with `answer`."""
        self.send("ask", ask.model_dump(), transfer)

    def answer(self, name: str, limit: float) -> tuple[Answer, dict[str, Any] | None]:
        """What came of a request, and the kv_transfer_params of its answer. EngineGone as `wait`."""
        self.wait(lambda said: name in said.answers, limit)
        return self.said.answers[name]

    def counts(self, limit: float = 30) -> Counts:
        """VLLM's counters since they were last asked for."""
        before = len(self.said.counts)
        self.send("counts")
        self.wait(lambda said: len(said.counts) > before, limit)
        return self.said.counts[-1]

    def reset(self, limit: float = 60) -> bool:
        """Empty the local prefix cache; False if vLLM could not."""
        before = len(self.said.resets)
        self.send("reset")
        self.wait(lambda said: len(said.resets) > before, limit)
        return self.said.resets[-1]

    # -- its end ---------------------------------------------------------------------------------------------------------------
    def kill(self) -> None:
        """A fault: the engine is gone from one moment to the next."""
        process.end(self.mark)
        self._guard.wait(30)

    def end(self, limit: float = 30) -> process.Ended:
        """Let it shut down, and end what is left of it; says what that was."""
        with contextlib.suppress(EngineGone):
            if self.said.error is None and self._guard.poll() is None:
                self.send("stop")
                self.wait(lambda said: said.ended, limit)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(EXIT_LIMIT if self.said.ended or self.said.error else 0.1)
        how = (
            "exit"
            if self._guard.poll() is not None and self.said.ended
            else "signal"
            if self._guard.poll() is not None
            else "timeout"
        )
        found = process.Ended(how, self._guard.returncode or 0, 0.0)
        if how == "exit" and self._left.is_file():
            told = json.loads(self._left.read_text(encoding="utf-8"))
            found.processes, found.ports, found.files = (
                told["processes"],
                told["ports"],
                told["files"],
            )
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
