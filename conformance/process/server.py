# SPDX-License-Identifier: Apache-2.0
"""A server that a connector needs: its description in the settings, and its process."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvconform.errors import EnvironmentProblem
from kvconform.process.alive import of_harness

PORT = re.compile(r"\{port:([a-z][a-z0-9-]*)\}")
"""Placeholder for a free TCP port of this machine; within a process a name stands for one port."""
WORDS = ("python", "server_tmp")
"""The other placeholders, each in braces."""

POLL = 0.05
"""Seconds between two attempts to reach a server that is starting."""
CALL_LIMIT = 30.0
"""Seconds that a command or an HTTP request may take."""


class Call(BaseModel):
    """A TCP address that must accept a connection, a URL that must not fail, or a shell command."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tcp: str | None = Field(default=None, description="host:port")
    http: str | None = Field(default=None, description="URL")
    method: str = Field(default="GET", description="of the request to `http`")
    body: dict[str, Any] | None = Field(
        default=None, description="of the request to `http`, as JSON"
    )
    command: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Call:
        if sum(given is not None for given in (self.tcp, self.http, self.command)) != 1:
            raise ValueError("give one of tcp, http and command")
        if self.body is not None and (self.http is None or self.method == "GET"):
            raise ValueError(
                'a body goes with http, and with a method that sends one (method = "POST")'
            )
        return self


class ServerSpec(BaseModel):
    """Description of a server in the settings.

    Strings may contain `{port:NAME}`, `{python}` (the interpreter) and `{server_tmp}` (the servers'
    directory).
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    command: str | list[str] = Field(
        description="runs until it is stopped: a shell command, or a program with its arguments"
    )
    requires: list[str] = Field(
        default=[], description="packages that its commands need, as pip requirements"
    )
    ready: Call = Field(description="what shows that it can be used")
    clear: Call | None = Field(
        default=None,
        description="makes it forget all KV; done before each run, when no engine uses it",
    )
    lose: Call | None = Field(
        default=None,
        description="the same under an engine that uses it, for live.store-lost (default: clear)",
    )
    damage: str | None = Field(
        default=None,
        description="shell command that damages every value as $KVCONFORM_DAMAGE says (removed,"
        " truncated, longer or garbage) and prints how many these were, as its last word",
    )
    stop: str | None = Field(default=None, description="shell command that asks it to end")
    timeout: float = Field(default=60.0, gt=0, description="seconds until it has to be ready")
    grace: float = Field(
        default=5.0, ge=0, description="seconds between being asked to end and being killed"
    )

    @property
    def losing(self) -> Call | None:
        """The call that makes the server forget while it is in use, if there is one."""
        return self.lose or self.clear

    @field_validator("timeout", "grace", mode="before")
    @classmethod
    def _whole_seconds(cls, value: Any) -> Any:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def port_names(value: Any) -> set[str]:
    """Return the names of the ports in a value's strings."""
    if isinstance(value, str):
        return set(PORT.findall(value))
    if isinstance(value, dict):
        return set().union(*(port_names(item) for item in value.values()))
    if isinstance(value, (list, tuple)):
        return set().union(*(port_names(item) for item in value))
    return set()


def has_placeholder(text: str) -> bool:
    """Return whether a string contains `{port:NAME}`, `{python}` or `{server_tmp}`."""
    return bool(port_names(text)) or any("{" + word + "}" in text for word in WORDS)


def filled(value: Any, ports: dict[str, int], words: dict[str, str]) -> Any:
    """Return the value with ports and `words` filled in; a string that is only a port is an int.

    KeyError for a port that has no number.
    """
    if isinstance(value, str):
        text = PORT.sub(lambda found: str(ports[found[1]]), value)
        if found := PORT.fullmatch(value):
            return ports[found[1]]  # options want a number
        for word, meaning in words.items():
            text = text.replace("{" + word + "}", meaning)
        return text
    if isinstance(value, dict):
        return {key: filled(item, ports, words) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [filled(item, ports, words) for item in value]
    return value


class Server:
    """One server process.

    `spec`: with its placeholders filled. `log`: file that the output is appended to. `base` and
    `environment`: where its commands run.
    """

    def __init__(
        self, spec: ServerSpec, log: Path, base: Path, environment: dict[str, str]
    ) -> None:
        self.spec, self.log, self.base, self.environment = spec, log, base, environment
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the server's command is running."""
        return self._guard is not None and self._guard.poll() is None

    def start(self) -> None:
        """Start the server and wait until it is ready.

        EnvironmentProblem if it does not become ready; its processes have ended then.
        """
        if self.running:
            return
        if isinstance(self.spec.command, str):
            command, shown = ["/bin/sh", "-c", self.spec.command], self.spec.command
        else:
            command, shown = list(self.spec.command), " ".join(self.spec.command)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with of_harness(), self.log.open("ab") as output:
            output.write(f"$ {shown}\n".encode())
            output.flush()
            self._guard = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kvconform.process.supervisor",
                    str(self.spec.grace),
                    *command,
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=self.base,
                env=self.environment,
                start_new_session=True,
            )
        until = time.monotonic() + self.spec.timeout
        while not self._call(self.spec.ready):
            if not self.running:
                self._failed(f"ended with status {self._guard.returncode} before it was ready")
            if time.monotonic() > until:
                self._failed(f"was not ready within {self.spec.timeout:g} s")
            time.sleep(POLL)

    def _failed(self, what: str) -> None:
        self.kill()
        lines = [
            line
            for line in self.log.read_text("utf-8", "replace").splitlines()
            if line.strip() and not line.startswith("$ ")
        ]
        words = f": {lines[-1].strip()[:200]}" if lines else ""
        raise EnvironmentProblem(f"server {self.spec.name} {what}{words} (its output: {self.log})")

    def clear(self) -> None:
        """Make the server forget what it stored, while it is not in use.

        EnvironmentProblem if that fails.
        """
        self._forget(self.spec.clear)

    def lose(self) -> None:
        """Make the server forget what it stored while an engine uses it: a fault."""
        self._forget(self.spec.losing)

    def _forget(self, call: Call | None) -> None:
        if call is not None and not self._call(call):
            raise EnvironmentProblem(
                f"server {self.spec.name} cannot be cleared: {_words(call)} failed"
                f" (its output: {self.log})"
            )

    def damage(self, how: str) -> int:
        """Damage the values: a fault. Return how many; 0 if the server has no command for it.

        EnvironmentProblem if the command fails, or does not say how many values it has damaged.
        """
        if self.spec.damage is None:
            return 0
        said = self._shell(self.spec.damage, KVCONFORM_DAMAGE=how)
        words = (said or "").split()
        count = words[-1] if words else ""
        if not count.isdecimal():
            problem = "failed" if said is None else "does not print how many it has damaged"
            raise EnvironmentProblem(
                f"the values of server {self.spec.name} cannot be damaged: `{self.spec.damage}`"
                f" {problem} (its output: {self.log})"
            )
        return int(count)

    def freeze(self) -> None:
        """Suspend the server's processes: it accepts connections but does not respond.

        No error if it does not run.
        """
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the server's suspended processes. No error if there are none."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        """Send a signal to the server's processes, not to the supervisor: it must keep running."""
        # Imported here because the command line loads this module for its settings.
        import psutil

        if self._guard is None or not self.running:
            return
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._guard.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)

    def kill(self) -> None:
        """Kill the server at once, as a crash would. No error if it does not run."""
        self._end(b"k")

    def stop(self) -> str | None:
        """Ask the server to end, then end it. No error if it does not run.

        Returns a sentence if the stop command failed or the server had ended by itself, else None.
        """
        self.thaw()
        if not self.running:
            problem = None
            if self._guard is not None:
                status = self._guard.returncode
                problem = f"server {self.spec.name} had ended by itself with status {status}"
                problem += f" (its output: {self.log})"
            self._end(b"")
            return problem
        problem = None
        if self.spec.stop is not None and self._shell(self.spec.stop) is None:
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
        except subprocess.TimeoutExpired:  # the command dies with its supervisor
            guard.kill()
            guard.wait(5)

    # -- calls
    def _call(self, call: Call) -> bool:
        if call.command is not None:
            return self._shell(call.command) is not None
        if call.tcp is not None:
            host, _, port = call.tcp.rpartition(":")
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port)), timeout=1),
            ):
                return True
            return False
        # Imported here because the command line loads this module for its settings.
        import urllib.error
        import urllib.request

        assert call.http is not None
        body = None if call.body is None else json.dumps(call.body).encode()
        request = urllib.request.Request(
            call.http,
            body,
            {"Content-Type": "application/json"} if body else {},
            method=call.method,
        )
        # The server is local, so a configured proxy must not be used.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            opener.open(request, timeout=CALL_LIMIT) as response,
        ):
            return bool(response.status < 400)
        return False

    def _shell(self, command: str, **environment: str) -> str | None:
        """Run a command; return what it printed, or None if it failed or took too long."""
        with self.log.open("ab") as output, contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command,
                shell=True,
                cwd=self.base,
                env=self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                timeout=CALL_LIMIT,
                text=True,
                errors="replace",
            )
            output.write(done.stdout.encode())
            return None if done.returncode else done.stdout
        return None


def _words(call: Call) -> str:
    if call.http:
        return f"{call.method} {call.http}"
    return f"`{call.command}`" if call.command else f"connecting to {call.tcp}"
