# SPDX-License-Identifier: Apache-2.0
"""One server process: started, waited for, asked to forget, made to stand still, killed, started again, ended."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from kvconform.errors import EnvironmentProblem
from kvconform.server_spec import Call, ServerSpec

POLL = 0.05
CALL_LIMIT = 10.0


class Server:
    """`spec` has its placeholders filled. Its output goes to `log`, which is kept; its commands run in `base` with `environment`."""

    def __init__(self, spec: ServerSpec, log: Path, base: Path, environment: dict[str, str]) -> None:
        self.spec, self.log, self.base, self.environment = spec, log, base, environment
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether its command has not ended."""
        return self._guard is not None and self._guard.poll() is None

    def start(self) -> None:
        """Start it and wait until it is ready. EnvironmentProblem in one sentence if it does not get there; nothing is left then."""
        if self.running:
            return
        command = ["/bin/sh", "-c", self.spec.command] if isinstance(self.spec.command, str) else list(self.spec.command)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            output.write(f"$ {self.spec.command if isinstance(self.spec.command, str) else ' '.join(command)}\n".encode())
            output.flush()
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "kvconform.guard", str(self.spec.grace), *command],
                stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=self.base, env=self.environment, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + self.spec.timeout
        while not self._call(self.spec.ready):
            if not self.running:
                self._failed(f"ended with status {self._guard.returncode} before it was ready")
            if time.monotonic() > until:
                self._failed(f"was not ready within {self.spec.timeout:g} s")
            time.sleep(POLL)

    def _failed(self, what: str) -> None:
        self.kill()
        lines = [line for line in self.log.read_text("utf-8", "replace").splitlines() if line.strip() and not line.startswith("$ ")]
        words = f": {lines[-1].strip()[:200]}" if lines else ""
        raise EnvironmentProblem(f"server {self.spec.name} {what}{words} (its output: {self.log})")

    def clear(self) -> None:
        """Make it forget what it stored; nothing uses it. EnvironmentProblem if it does not."""
        self._forget(self.spec.clear)

    def lose(self) -> None:
        """A fault: the same while an engine uses it."""
        self._forget(self.spec.losing)

    def _forget(self, call: Call | None) -> None:
        if call is not None and not self._call(call):
            raise EnvironmentProblem(f"server {self.spec.name} cannot be cleared: {_words(call)} failed (its output: {self.log})")

    def freeze(self) -> None:
        """Its processes stand still: connections to it are accepted, and nobody answers. No error if it does not run."""
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                process.suspend()

    def thaw(self) -> None:
        """What stands still goes on. No error if nothing does."""
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                process.resume()

    def _processes(self) -> list[psutil.Process]:
        """All of it but the guard, which has to hear of the end."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self._guard.pid).children(recursive=True) if self._guard is not None and self.running else []
        return []

    def kill(self) -> None:
        """End it at once, as a crash would. No error if it does not run."""
        self._end(b"k")

    def stop(self) -> str | None:
        """Ask it to end, and end it; returns a sentence if the stop command failed. No error if it does not run."""
        self.thaw()
        if not self.running:
            self._end(b"")
            return None
        problem = None
        if self.spec.stop is not None and not self._shell(self.spec.stop):
            problem = f"stop command `{self.spec.stop}` of server {self.spec.name} failed"
        self._end(b"")
        return problem

    def _end(self, word: bytes) -> None:
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None
        with contextlib.suppress(OSError):
            guard.stdin.write(word)
            guard.stdin.flush()
        with contextlib.suppress(OSError):
            guard.stdin.close()
        try:
            guard.wait(self.spec.grace + 25)
        except subprocess.TimeoutExpired:  # the command dies with it
            guard.kill()
            guard.wait(5)

    # -- calls -----------------------------------------------------------------------------------------------------------------
    def _call(self, call: Call) -> bool:
        if call.command is not None:
            return self._shell(call.command)
        if call.tcp is not None:
            host, _, port = call.tcp.rpartition(":")
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                return True
            return False
        assert call.http is not None
        body = None if call.body is None else json.dumps(call.body).encode()
        request = urllib.request.Request(call.http, body, {"Content-Type": "application/json"} if body else {}, method=call.method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a server of ours is never behind a proxy
        with contextlib.suppress(OSError, urllib.error.URLError), opener.open(request, timeout=CALL_LIMIT) as answer:
            return bool(answer.status < 400)
        return False

    def _shell(self, command: str) -> bool:
        with self.log.open("ab") as output, contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command, shell=True, cwd=self.base, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                timeout=CALL_LIMIT,
            )  # fmt: skip
            return done.returncode == 0
        return False


def _words(call: Call) -> str:
    return f"{call.method} {call.http}" if call.http else f"`{call.command}`" if call.command else f"connecting to {call.tcp}"
