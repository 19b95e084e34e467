# SPDX-License-Identifier: Apache-2.0
"""Set-up and tear-down commands: servers that a connector needs. They run in a shell, once per run, in the directory
of the settings file."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from kvconform.errors import EnvironmentProblem
from kvconform.settings import Settings


class Servers:
    """Runs the commands. What they print goes to `log`. `tmp` is `$KVCONFORM_TMP`: a directory of this run, the same for all commands."""

    def __init__(self, settings: Settings, tmp: Path, log: Path) -> None:
        self.settings, self.tmp, self.log = settings, tmp, log
        self._down = False

    def up(self) -> None:
        """Run the set-up commands. EnvironmentProblem if one fails or takes too long."""
        for command in self.settings.setup:
            problem = self._run(command)
            if problem:
                raise EnvironmentProblem(f"set-up command `{command}` {problem}{self._last_words()}")

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
