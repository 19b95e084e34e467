# SPDX-License-Identifier: Apache-2.0
"""A connector in a folder of its own, and a warm server that judges it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import program_rig
from kvconform.config.settings import Settings
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
    # Not pytest's own directory: the path of a socket must be short.
    with (
        tempfile.TemporaryDirectory(prefix="kvw-", dir="/tmp") as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        runtime, folder = Path(name) / "run", Path(name) / "mine"
        runtime.mkdir(mode=0o700)
        folder.mkdir()
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        patch.setenv("KVCONFORM_SERVER_IDLE", "300")
        (folder / "mine.py").write_text(RIGHT)
        try:
            yield Project(folder, {"XDG_RUNTIME_DIR": str(runtime)})
        finally:
            for each in servers(runtime):
                os.kill(each.pid, signal.SIGKILL)


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
    (inner,) = [
        path for path in client.path_for(settings).parent.glob("*.*.sock") if _answers(path)
    ]
    return int(inner.name.split(".")[1])


def _answers(path: Path) -> bool:
    with contextlib.suppress(client.Gone):
        client.connect(path).close()
        return True
    return False


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
