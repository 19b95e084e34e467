# SPDX-License-Identifier: Apache-2.0
"""What a connector needs around it: set-up and tear-down commands of a whole run, and servers, of which each worker process has its own.

Servers listen on free TCP ports, which no two processes of kvconform on one machine get at the same time.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from kvconform.errors import EnvironmentProblem
from kvconform.process.server import Server, ServerSpec, filled, port_names

RANGE = range(20_000, 32_000)
"""Below the ports that systems hand out to clients, so that no connection takes one between choice and use."""
_generator = random.SystemRandom()


class Ports:
    """Ports by name. While this object is open, no other process that asks here gets them."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._locks: list[socket.socket] = []

    def choose(self, name: str) -> int:
        """The port of a name: a new one the first time. EnvironmentProblem if none is free."""
        if name not in self.numbers:
            self.numbers[name] = self._free()
        return self.numbers[name]

    def _free(self) -> int:
        for port in _generator.sample(RANGE, 200):
            if not is_free(port):
                continue
            lock = _lock(port)
            if lock is not None:
                self._locks.append(lock)
                return port
        raise EnvironmentProblem(
            f"no free TCP port was found between {RANGE.start} and {RANGE.stop} on 127.0.0.1"
        )

    def renew(self, beyond: int) -> None:
        """Forget them all, and let others have them, once there are more than `beyond`."""
        if len(self.numbers) > beyond:
            self.numbers.clear()
            self.close()

    def close(self) -> None:
        """Others may have them."""
        while self._locks:
            self._locks.pop().close()


def is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind(("127.0.0.1", port))
            probe.listen(
                1
            )  # bind alone succeeds beside a listener with SO_REUSEADDR on some systems
            return True
    return False


def _lock(port: int) -> socket.socket | None:
    """Something that one process of this machine has at a time, and that goes with it: on Linux a name without a file."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform != "linux":
        return lock
    try:
        lock.bind(f"\0kvconform-port-{port}")
    except OSError:
        lock.close()
        return None
    return lock


FILLED = ("extra_config", "env")


class Surroundings(Protocol):
    """The settings that are read here (a part of kvconform.config.settings.Settings)."""

    @property
    def servers(self) -> Sequence[ServerSpec]: ...
    @property
    def setup(self) -> Sequence[str]: ...
    @property
    def teardown(self) -> Sequence[str]: ...
    @property
    def setup_timeout(self) -> float: ...
    @property
    def env(self) -> dict[str, str]: ...
    @property
    def base(self) -> Path: ...
    def model_copy(self: SettingsT, *, update: dict[str, Any]) -> SettingsT: ...


SettingsT = TypeVar("SettingsT", bound=Surroundings)


class Servers:
    """The servers of a configuration, for one process (a worker, or a live run): started in their order, stopped in the other.

    `tmp`: a directory that they may write to, `$KVCONFORM_TMP` and `{server_tmp}` of their commands. `logs`: where what they print is kept,
    in `<prefix><name>.log`. A context manager: nothing of them is left behind it, nor when this process ends in any other way.
    """

    active: list[Servers] = []
    """Those that run in this process: what `clear_all` is about."""

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
        """The value with `{port:NAME}`, `{python}` and `{server_tmp}` replaced in its strings."""
        return filled(
            value, self.ports.numbers, {"python": sys.executable, "server_tmp": str(self.tmp)}
        )

    def settle(self, settings: SettingsT) -> SettingsT:
        """The settings as this process has to take them: extra_config and env with placeholders filled."""
        return settings.model_copy(
            update={key: self.fill(getattr(settings, key)) for key in FILLED}
        )

    def up(self) -> None:
        """Start all that do not run. EnvironmentProblem in one sentence if one does not get ready; then none is left."""
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
        """Stop all; returns sentences about stop commands that failed. The ports may be another's then."""
        if self in Servers.active:
            Servers.active.remove(self)
        problems = [server.stop() for server in reversed(self.all.values())]
        self.ports.close()
        return [problem for problem in problems if problem]

    def clear(self) -> None:
        """Make all forget what they store, and start those anew that a fault has ended. EnvironmentProblem if one does not."""
        for server in self.all.values():
            if server.running:
                server.clear()
            else:
                server.start()

    @staticmethod
    def clearable() -> list[bool]:
        """Of each server of this process, whether it can be told to forget."""
        return [
            server.spec.losing is not None
            for servers in Servers.active
            for server in servers.all.values()
        ]

    def kill(self, name: str) -> None:
        """A fault: the server is gone from one moment to the next."""
        self.all[name].kill()

    def restart(self, name: str) -> None:
        """A fault: the server is gone and comes back, on the same port, with what it keeps on disk."""
        self.all[name].kill()
        self.all[name].start()

    def freeze(self, name: str) -> None:
        """A fault: the server answers nothing, until it is thawed."""
        self.all[name].freeze()

    def thaw(self, name: str) -> None:
        """The server goes on where it stood still."""
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
    """Before a run: no server of this process knows anything of an earlier one."""
    for servers in Servers.active:
        servers.clear()


def _stringed(spec: dict[str, Any]) -> ServerSpec:
    """Of filled fields: what was nothing but a port is a number, and has to be text in a command."""
    command = spec["command"]
    return ServerSpec(
        **{
            **spec,
            "command": command if isinstance(command, str) else [str(part) for part in command],
        }
    )


class Commands:
    """Set-up and tear-down commands: run in a shell, once per run, in the settings file's directory. What they print goes to `log`.
    `tmp` is `$KVCONFORM_TMP`: a directory of this run, the same for all commands."""

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
        """Run all tear-down commands, whatever happens, once; returns sentences about those that failed."""
        if self._down:
            return []
        self._down = True
        found = [(command, self._run(command)) for command in self.settings.teardown]
        return [f"tear-down command `{command}` {problem}" for command, problem in found if problem]

    def _run(self, command: str) -> str | None:
        """What went wrong, or None. Output goes to a file, not a pipe, so that a server left in the background blocks nothing."""
        environment = {**os.environ, **self.settings.env, "KVCONFORM_TMP": str(self.tmp)}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            output.write(f"$ {command}\n".encode())
            output.flush()
            try:
                done = subprocess.run(
                    command,
                    shell=True,
                    cwd=self.settings.base,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=self.settings.setup_timeout,
                )
            except subprocess.TimeoutExpired:
                return f"did not end within {self.settings.setup_timeout:g} s"
            except OSError as error:
                return f"could not be started: {error.strerror or error}"
        return f"failed with status {done.returncode}" if done.returncode else None

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines and not lines[-1].startswith("$ ") else ""
