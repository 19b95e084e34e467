# SPDX-License-Identifier: Apache-2.0
"""Runs a child process with a time limit, and cleans up its processes, ports and shared memory.

Every process that the child starts inherits an environment variable with this run's mark. So a
process that left its process group, or whose parent has ended, is found too, unless it was given an
environment of its own. If this process is killed, a watcher (`python -m kvconform.live.process
MARK`, with a pipe as standard input) does the same when the pipe closes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kvconform.process.supervisor import Shared, name_of, ports_of

MARK = "KVCONFORM_LIVE_RUN"
"""Environment variable: the mark of a run."""
LEAVE = 60.0
"""Seconds that the child has to exit after its work, at least; a running thread keeps it alive."""
GRACE = 5.0
"""Seconds that the child's own processes may take to exit after the child."""
EVERY = 0.25
"""Seconds between two looks at the child."""


@dataclass
class Ended:
    """How a child ended.

    `how`: exit, signal or timeout. `status`: its exit status, or the signal's number. Left behind
    by the child: `processes` (their command lines), the TCP `ports` that these listened on, and
    `files` in /dev/shm. All of these are gone now, except for the processes in `stuck`.
    """

    how: str
    status: int
    seconds: float
    processes: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)


def run(
    command: Sequence[str],
    *,
    limit: float,
    log: Path,
    environment: Mapping[str, str],
    cwd: Path,
    over: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run `command` until it ends, or the time is up, and clean up after it.

    The time is up after `limit` seconds. After `over` was first true, it is up when as much time
    has passed as before, and at least LEAVE seconds: on a busy machine, all takes longer.

    Its output goes to `log`. The clean-up is done also if an exception (for example an interrupt)
    is raised.
    """
    mark = uuid.uuid4().hex
    began = time.monotonic()
    shared = Shared()
    how = "timeout"
    status = 0
    with log.open("ab") as output, _watched(mark) as watcher:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env={**environment, MARK: mark},
            start_new_session=True,
        )
        try:
            _send_session(watcher, child.pid)
            leave = began + limit
            while time.monotonic() < leave:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = child.wait(EVERY)
                    how = "exit" if status >= 0 else "signal"
                    break
                shared.look(_tree(child.pid))
                if over():
                    now = time.monotonic()
                    leave = min(leave, now + max(LEAVE, now - began))
            if how == "timeout":
                _dump_stacks(child, mark)
            found = Ended(how, abs(status), 0.0)
            if how == "exit":
                _wait(mark, child.pid)
            left = _marked(mark, child.pid)
            others = [process for process in left if process.pid != child.pid]
            found.processes = [name_of(process) for process in others]
            found.ports = sorted({port for process in others for port in ports_of(process)})
            found.files = shared.left(left)
        finally:
            stuck = end(mark, child.pid)
            child.wait(10)
    found.stuck = stuck
    for path in found.files:
        with contextlib.suppress(OSError):
            os.unlink(path)
    found.seconds = time.monotonic() - began
    return found


@contextlib.contextmanager
def _watched(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """Keep a watcher during a run, which ends the run if this process is killed."""
    watcher = subprocess.Popen(
        [sys.executable, "-m", "kvconform.live.process", mark],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield watcher
    finally:
        with contextlib.suppress(OSError):
            watcher.communicate(b"done", timeout=60)


def _send_session(watcher: subprocess.Popen[bytes], session: int) -> None:
    """Send the child's session to the watcher."""
    with contextlib.suppress(OSError):
        assert watcher.stdin is not None
        watcher.stdin.write(f"{session}\n".encode())
        watcher.stdin.flush()


def watch(mark: str) -> None:
    """Wait until standard input closes, and end the run unless the last word was `done`.

    This is the watcher. The first word is the child's session.
    """
    said = sys.stdin.buffer.read().split()
    if said[-1:] != [b"done"]:
        end(mark, int(said[0]) if said else None)


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a Python module."""
    return [sys.executable, "-X", "faulthandler", "-m", module, *arguments]


def end(mark: str, session: int | None = None) -> list[str]:
    """Kill every process of a run and of its child's session; return the names of survivors."""
    # Several times: a process may have been starting another one.
    for _ in range(5):
        left = _marked(mark, session)
        if not left:
            return []
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
    return [name_of(process) for process in _marked(mark, session)]


def _dump_stacks(child: subprocess.Popen, mark: str) -> None:
    """Have the processes that hang print the stacks of all threads to the log, with SIGABRT."""
    for process in _marked(mark, child.pid):
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(3)


def _ours(process: psutil.Process, mark: str, session: int | None) -> bool:
    """Return whether a process belongs to a run, by its environment or its session.

    A program that sets its own title, as vLLM's processes do, overwrites its environment.
    """
    return process.environ().get(MARK) == mark or (
        session is not None and os.getsid(process.pid) == session
    )


def _marked(mark: str, session: int | None = None) -> list[psutil.Process]:
    """Return the processes of a run, without zombies."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if _ours(process, mark, session) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _wait(mark: str, session: int) -> None:
    """Wait until the processes of a run have ended, GRACE seconds at most."""
    limit = time.monotonic() + GRACE
    while _marked(mark, session) and time.monotonic() < limit:
        time.sleep(0.1)


def _tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; an empty list if it has ended."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


if __name__ == "__main__":
    watch(sys.argv[1])
