# SPDX-License-Identifier: Apache-2.0
"""The surroundings that a connector needs: set-up and tear-down commands, servers, and their ports.

Commands belong to a whole run; each worker process has its own servers. Servers listen on free TCP
ports, and no two processes of kvconform on one machine use the same port at the same time.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from kvconform.errors import EnvironmentProblem
from kvconform.process.alive import of_harness
from kvconform.process.server import WORDS, Server, ServerSpec, filled, port_names

RANGE = range(20_000, 32_000)
"""Ports below those that systems assign to clients, so no connection takes one before its use."""
_generator = random.SystemRandom()


class Ports:
    """Ports by name, reserved while this object is open.

    The reservation excludes processes that choose ports with this class.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._locks: list[socket.socket] = []

    def choose(self, name: str) -> int:
        """Return the port of a name, choosing it the first time.

        EnvironmentProblem if none is free.
        """
        if name not in self.numbers:
            self.numbers[name] = self._free()
        return self.numbers[name]

    def _free(self) -> int:
        for port in _generator.sample(RANGE, 200):
            if not is_free(port):
                continue
            with of_harness():
                lock = _lock(port)
            if lock is not None:
                self._locks.append(lock)
                return port
        raise EnvironmentProblem(
            f"no free TCP port was found between {RANGE.start} and {RANGE.stop} on 127.0.0.1"
        )

    def renew(self, beyond: int) -> None:
        """Release all ports and their names once there are more than `beyond`."""
        if len(self.numbers) > beyond:
            self.numbers.clear()
            self.close()

    def close(self) -> None:
        """Release all ports."""
        while self._locks:
            self._locks.pop().close()


def is_free(port: int) -> bool:
    """Return whether a server could listen on the port now."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind(("127.0.0.1", port))
            probe.listen(1)  # on some systems bind succeeds although another server listens there
            return True
    return False


def _lock(port: int) -> socket.socket | None:
    """Return a lock that one process of this machine holds until it ends; None if it is taken.

    On Linux it is an abstract socket name. Elsewhere there is no lock.
    """
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform != "linux":
        return lock
    try:
        lock.bind(f"\0kvconform-port-{port}")
    except OSError:
        lock.close()
        return None
    return lock


FILLED = ("extra_config", "extra_config_after_restart", "env")
"""The settings whose placeholders are filled."""


class Surroundings(Protocol):
    """The settings used here, a part of kvconform.config.settings.Settings."""

    @property
    def servers(self) -> Sequence[ServerSpec]:
        """Descriptions of the servers."""

    @property
    def setup(self) -> Sequence[str]:
        """Set-up commands."""

    @property
    def teardown(self) -> Sequence[str]:
        """Tear-down commands."""

    @property
    def setup_timeout(self) -> float:
        """Seconds that a set-up or tear-down command may take."""

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for servers and commands."""

    @property
    def base(self) -> Path:
        """The settings file's directory."""

    def model_copy(self: SettingsT, *, update: dict[str, Any]) -> SettingsT:
        """Return a copy with these fields replaced."""


SettingsT = TypeVar("SettingsT", bound=Surroundings)


class Servers:
    """The servers of one process (a worker, or a live run), started in order, stopped in reverse.

    `tmp`: a directory that they may write to, `$KVCONFORM_TMP` and `{server_tmp}` in their
    commands. `logs`: directory for their output, one `<prefix><name>.log` each. A context manager;
    the servers end with it, and also when this process ends in any other way.
    """

    active: list[Servers] = []
    """The objects whose servers run in this process, for `clear_all`."""

    def __init__(
        self, settings: Surroundings, tmp: Path, logs: Path, prefix: str = "server-"
    ) -> None:
        self.ports, self.tmp = Ports(), tmp
        asked = [spec.model_dump() for spec in settings.servers]
        for name in sorted(port_names([asked, *(getattr(settings, key) for key in FILLED)])):
            self.ports.choose(name)
        self.environment = {**os.environ, **self.fill(settings.env), "KVCONFORM_TMP": str(tmp)}
        self.all = {
            spec["name"]: Server(
                _stringed(self.fill(spec)),
                logs / f"{prefix}{spec['name']}.log",
                settings.base,
                self.environment,
            )
            for spec in asked
        }

    def fill(self, value: Any) -> Any:
        """Return the value with `{port:NAME}`, `{python}` and `{server_tmp}` filled in."""
        meanings = (sys.executable, str(self.tmp))
        return filled(value, self.ports.numbers, dict(zip(WORDS, meanings, strict=True)))

    def settle(self, settings: SettingsT) -> SettingsT:
        """Return the settings for this process: placeholders in options and env are filled."""
        return settings.model_copy(
            update={key: self.fill(getattr(settings, key)) for key in FILLED}
        )

    def up(self) -> None:
        """Start all servers that do not run.

        EnvironmentProblem if one does not become ready; all are stopped then.
        """
        self.tmp.mkdir(parents=True, exist_ok=True)
        if self not in Servers.active:
            Servers.active.append(self)
        try:
            for server in self.all.values():
                server.start()
        except BaseException:
            self.down()
            raise

    def down(self) -> list[str]:
        """Stop all servers and release their ports; return sentences about what went wrong.

        That is a failed stop command, or a server that had ended by itself.
        """
        if self in Servers.active:
            Servers.active.remove(self)
        problems = [server.stop() for server in reversed(self.all.values())]
        self.ports.close()
        return [problem for problem in problems if problem]

    def clear(self) -> None:
        """Make all servers forget what they store; restart those that a fault has ended.

        EnvironmentProblem if that fails.
        """
        for server in self.all.values():
            if server.running:
                server.clear()
            else:
                server.start()

    @staticmethod
    def clearable() -> list[bool]:
        """Return for each server of this process whether there is a call that makes it forget."""
        return [
            server.spec.losing is not None
            for servers in Servers.active
            for server in servers.all.values()
        ]

    def kill(self, name: str) -> None:
        """Kill a server at once: a fault."""
        self.all[name].kill()

    def restart(self, name: str) -> None:
        """Kill a server and start it again, on the same port, with its files on disk: a fault."""
        self.all[name].kill()
        self.all[name].start()

    def damage(self, how: str) -> int:
        """Damage the values of the servers that can be asked to; return how many: a fault.

        EnvironmentProblem if a server's command fails.
        """
        return sum(server.damage(how) for server in self.all.values())

    def freeze(self, name: str) -> None:
        """Suspend a server, so that it does not respond until it is thawed: a fault."""
        self.all[name].freeze()

    def thaw(self, name: str) -> None:
        """Resume a suspended server."""
        self.all[name].thaw()

    def __enter__(self) -> Servers:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()


def clear_all() -> None:
    """Make all servers of this process forget earlier runs; called before a run."""
    for servers in Servers.active:
        servers.clear()


def _stringed(spec: dict[str, Any]) -> ServerSpec:
    """Build a ServerSpec from filled fields; ports that are ints become text in its command."""
    command = spec["command"]
    return ServerSpec(
        **{
            **spec,
            "command": command if isinstance(command, str) else [str(part) for part in command],
        }
    )


class Commands:
    """Set-up and tear-down commands, run in a shell once per run, in the settings file's directory.

    `tmp`: `$KVCONFORM_TMP`, a directory of this run that all commands share. `log`: file for their
    output.
    """

    def __init__(self, settings: Surroundings, tmp: Path, log: Path) -> None:
        self.settings, self.tmp, self.log = settings, tmp, log
        self._down = False

    def up(self) -> None:
        """Run the set-up commands. EnvironmentProblem if one fails or takes too long."""
        for command in self.settings.setup:
            problem = self._run(command)
            if problem:
                raise EnvironmentProblem(
                    f"set-up command `{command}` {problem}{self._last_words()}"
                )

    def down(self) -> list[str]:
        """Run all tear-down commands, the first time only; return sentences about failed ones."""
        if self._down:
            return []
        self._down = True
        found = [(command, self._run(command)) for command in self.settings.teardown]
        return [f"tear-down command `{command}` {problem}" for command, problem in found if problem]

    def _run(self, command: str) -> str | None:
        """Run a command; return the rest of a sentence about its failure, or None.

        Output goes to a file, because a server left in the background would keep a pipe open. What
        the command has started ends with it if it takes too long or is interrupted.
        """
        environment = {**os.environ, **self.settings.env, "KVCONFORM_TMP": str(self.tmp)}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            output.write(f"$ {command}\n".encode())
            output.flush()
            try:
                process = subprocess.Popen(
                    command,
                    shell=True,
                    cwd=self.settings.base,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                return f"could not be started: {error.strerror or error}"
        with process:
            try:
                status = process.wait(self.settings.setup_timeout)
            except BaseException as error:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    return f"did not end within {self.settings.setup_timeout:g} s"
                raise
        return f"failed with status {status}" if status else None

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines and not lines[-1].startswith("$ ") else ""
