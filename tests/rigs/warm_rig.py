# SPDX-License-Identifier: Apache-2.0
"""A connector in a folder of its own, and a warm server that judges it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

import program_rig
from kvconform.config.settings import Settings
from kvconform.process import wire
from kvconform.watch import client

RUN = "lifecycle.last-token[reference-sync-v1-d1-b4]"
HEAD = "from kvconform.refimpl.connector import ReferenceConnector\n\n\n"
GOOD = HEAD + "class Mine(ReferenceConnector):\n    more = 0\n"
HOOK = """
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found + self.more, later
"""
EXITS = """
    def get_finished(self, finished_req_ids):
        import os
        import signal
        os.killpg(os.getpgrp(), signal.SIGKILL)
"""
RIGHT = GOOD + HOOK
NOTE = "kvconform: through the warm server (--no-server does without)\n"
WRONG = RIGHT.replace("more = 0", "more = 4")


@dataclass
class Project:
    """A folder with the connector `mine:Mine`, and the environment of its warm server."""

    folder: Path
    environment: dict[str, str]

    @property
    def file(self) -> Path:
        return self.folder / "mine.py"

    @property
    def settings(self) -> Settings:
        return Settings(
            connector="mine:Mine",
            extra_config={"store": "{tmp}"},
            pythonpath=[str(self.folder)],
            select=[RUN],
            workers=1,
            report_dir=str(self.folder / "kvconform-report"),
        )

    def options(self, *more: str) -> list[str]:
        """Return a command's options for the connector."""
        extra = ["--extra-config", '{"store": "{tmp}"}', "--pythonpath", ".", "-n", "1"]
        return ["mine:Mine", *extra, "-k", RUN, *more]

    def kvconform(self, command: str, *more: str) -> subprocess.CompletedProcess[str]:
        """Run the program for the connector."""
        arguments = [command, *self.options(*more)]
        return program_rig.kvconform(*arguments, cwd=self.folder, env=self.environment)


@contextlib.contextmanager
def project() -> Iterator[Project]:
    """Yield a project whose servers are no one else's; end them afterwards."""
    with _place() as runtime:
        folder = runtime.with_name("mine")
        folder.mkdir()
        (folder / "mine.py").write_text(RIGHT)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", str(runtime))
            patch.setenv("KVCONFORM_SERVER_IDLE", "300")
            # Tests edit a file within a second, and a run without a server would keep its bytecode.
            patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
            yield Project(folder, {"XDG_RUNTIME_DIR": str(runtime)})


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """Yield a directory for the sockets of servers; end the servers afterwards."""
    # Not pytest's own directory: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="kvw-", dir="/tmp") as name:
        runtime = Path(name) / "run"
        runtime.mkdir(mode=0o700)
        try:
            yield runtime
        finally:
            _end_servers(runtime)


def _end_servers(runtime: Path) -> None:
    for each in servers(runtime):
        os.kill(each.pid, signal.SIGKILL)


@dataclass
class Warm:
    """A warm server for the end-to-end tests, which then need not import vLLM.

    The processes of one test run share it.
    """

    runtime: Path

    def run(self, *arguments: str, cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run `kvconform run` through the server; its note on standard error is taken off."""
        with self._environment():
            done = program_rig.kvconform("run", *arguments, cwd=cwd, **more)
        if not done.stderr.startswith(NOTE):  # it is gone, or out of date
            with self._environment():
                client.start(Settings(), client.path_for(Settings()))
                done = program_rig.kvconform("run", *arguments, cwd=cwd, **more)
        assert done.stderr.startswith(NOTE), done.stderr
        done.stderr = done.stderr.removeprefix(NOTE)
        return done

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        """Set the variables of the server, whatever tests have set since it was started.

        Starts it if none listens.
        """
        known = self.runtime / "environment.json"
        with pytest.MonkeyPatch.context() as patch:
            with (self.runtime / "starts").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if not known.exists():
                    mine = {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)}
                    known.write_text(json.dumps(mine), encoding="utf-8")
                environment = json.loads(known.read_text(encoding="utf-8"))
                for name in os.environ.keys() - environment.keys():
                    patch.delenv(name)
                for name, value in environment.items():
                    patch.setenv(name, value)
                path = client.path_for(Settings())
                try:
                    client.connect(path).close()
                except client.Gone:
                    client.start(Settings(), path)
            yield


@contextlib.contextmanager
def warm() -> Iterator[Warm]:
    """Yield a server that starts when it is needed, and ends when no process needs it any more."""
    # Not pytest's own directory: the path of a socket must be short.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))[:12]
    runtime = Path("/tmp") / f"kvw-{run}"
    with _shared(runtime) as users:
        try:
            yield Warm(runtime)
        finally:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end_servers(runtime)
                shutil.rmtree(runtime)


def _shared(directory: Path) -> IO[str]:
    """Return a file that all have open, with a shared lock, who use a directory; make that."""
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the last user has just removed it
            users = (directory / "users").open("w", encoding="utf-8")
            fcntl.flock(users, fcntl.LOCK_SH)
            if os.fstat(users.fileno()).st_nlink:
                return users
            users.close()


def servers(runtime: Path) -> list[psutil.Process]:
    """Return the servers (and what they have forked) whose sockets are below a directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if "kvconform.watch.server" in line and str(runtime) in line[-1]:
                found.append(process)
    return found


def server_of(settings: Settings) -> int:
    """Return the process id of the server that listens for these settings."""
    with contextlib.closing(client.connect(client.path_for(settings))) as connection:
        peer = wire.peer_of(connection)
    assert peer is not None
    return peer[0]


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, collected by its parent or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until the function returns something true; AssertionError if it never does."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
