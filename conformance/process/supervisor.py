# SPDX-License-Identifier: Apache-2.0
"""Supervisor process: runs a command and ends everything that it started, however its parent ends.

`python -m kvconform.process.supervisor GRACE COMMAND...` with a pipe as standard input. The command
runs as a child, in a session of its own. When the pipe is closed, the parent is gone or the command
ends, all its processes are asked to end, and killed after GRACE seconds; at once if a `k` came
through the pipe. Background processes of the command are adopted (Linux) and ended too.

`alive`, `name_of`, `ports_of` and `Shared` describe what a program leaves behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from kvconform.files import MEMORY

MAPPED = re.compile(rf"^{MEMORY}/[^/\s]+(?!\S)")
"""A shared memory segment: a file in MEMORY itself. Folders there are stores, and are kept."""


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that are neither gone nor zombies."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def name_of(process: psutil.Process) -> str:
    """Return the process's command line, or its id."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:120] or process.name()
    return str(process.pid)


def ports_of(process: psutil.Process) -> list[int]:
    """Return the TCP ports on which the process listens."""
    with contextlib.suppress(psutil.Error, AttributeError):
        return [
            c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN
        ]
    return []


class Shared:
    """Files in /dev/shm that a program has mapped.

    Files that existed before, or that other processes (a server, a daemon) map too, do not count.
    """

    def __init__(self) -> None:
        self._before = _listed()
        self._seen: set[str] = set()

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Record the files that the processes have mapped now."""
        for process in processes:
            self._seen |= _mapped(process.pid)

    def left(self, processes: Sequence[psutil.Process]) -> list[str]:
        """Return the sorted paths of the program's files that still exist.

        `processes`: the program's remaining processes.
        """
        self.look(processes)
        own = {path for path in self._seen - self._before if os.path.exists(path)}
        mine = {process.pid for process in processes}
        for pid in psutil.pids() if own else []:
            if pid not in mine:
                own -= _mapped(pid)
        return sorted(own)


def _listed() -> set[str]:
    with contextlib.suppress(OSError):
        return {f"{MEMORY}/{name}" for name in os.listdir(MEMORY)}
    return set()


def _mapped(pid: int) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for line in (
            Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            name = line[line.find("/") :] if MEMORY in line else ""
            if MAPPED.match(name) and not name.endswith("(deleted)"):
                found.add(name)
    return found


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PATIENCE = 0.2
"""Seconds between two checks of the parent and the command."""
LEFT = "KVCONFORM_GUARD_LEFT"
"""Environment variable: path of a JSON file for what a command left behind when it ended by itself.

It lists processes, ports and files in /dev/shm.
"""
LEAVE = 5.0
"""Seconds that the command's processes have to end after the command itself."""


def _prctl(option: int, value: int) -> None:
    """Call Linux's prctl; do nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def dies_with_parent() -> None:
    """Have this process killed when the thread that started it ends (Linux)."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _not_ours(*_: object) -> None:
    """Handle a signal by doing nothing, because the parent decides when to end.

    Ignoring the signal (SIG_IGN) would make the command ignore it too.
    """


def _tree(session: int) -> list[psutil.Process]:
    """Return all processes to end: descendants, and members of the command's session."""
    found = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == session:
                found[process.pid] = process
    return list(found.values())


def end(session: int, grace: float) -> None:
    """End all processes of the command, repeatedly, because ending ones may start others."""
    if grace > 0:
        for process in (asked := _tree(session)):
            with contextlib.suppress(psutil.Error):
                process.terminate()
        psutil.wait_procs(asked, timeout=grace)
    for _ in range(20):
        left = [process for process in _tree(session) if process.status() != psutil.STATUS_ZOMBIE]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)


def main(grace: float, command: list[str]) -> int:
    """Run the command; return its status, or 0 if it was ended on demand."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _not_ours)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    report = os.environ.pop(LEFT, None)  # removed, so that nested supervisors do not see it
    shared = Shared()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=dies_with_parent,
        restore_signals=True,
    )
    while child.poll() is None and os.getppid() == parent:
        if report:
            shared.look(_tree(child.pid))
        readable, _, _ = select.select([0], [], [], PATIENCE)
        if readable:
            grace = 0.0 if os.read(0, 1) == b"k" else grace
            end(child.pid, grace)
            child.poll()
            return 0
    if report and child.poll() is not None:
        _write_report(child.pid, report, shared)
    end(child.pid, grace)
    return child.wait()


def _write_report(session: int, path: str, shared: Shared) -> None:
    """Write what is left after at most LEAVE seconds to the JSON file `path`."""
    until = time.monotonic() + LEAVE
    while (left := alive(_tree(session))) and time.monotonic() < until:
        time.sleep(0.1)
    files = shared.left(left)
    with open(path, "w", encoding="utf-8") as file:
        ports = sorted({port for process in left for port in ports_of(process)})
        json.dump(
            {"processes": [name_of(process) for process in left], "ports": ports, "files": files},
            file,
        )


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
