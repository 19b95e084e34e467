# SPDX-License-Identifier: Apache-2.0
"""Starts a child process, waits for it with a time limit, and sees to it that nothing of it is left: no process, no port, no shared memory.

Every process that the child starts inherits an environment variable with this run's mark, so that one that left its process group, or
whose parent is gone, is found too, unless it was given an environment of its own. Should this process be killed, a watcher
(`python -m kvconform.live.process MARK`, with a pipe as standard input) does the same when the pipe closes.
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
"""Seconds that the child has to end, once it says that it has nothing more to do: a thread that goes on keeps its process."""
GRACE = 5.0
"""Seconds that what the child started has to end, once the child has."""
EVERY = 0.25


@dataclass
class Ended:
    """How a child ended: `how` is exit, signal or timeout, `status` its exit status or the signal's number. Left over when it had gone:
    processes (as their command lines), TCP ports that these listened on, files in /dev/shm. All of them are gone now, but `stuck`.
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
    """Run `command` to its end, to `limit` seconds, or to LEAVE seconds after `over` was first true. What it prints goes to `log`. Returns
    when nothing of it is left; an exception (an interrupt, say) leaves nothing either.
    """
    mark = uuid.uuid4().hex
    began = time.monotonic()
    shared = Shared()
    how, status = "timeout", 0
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
            _tell(watcher, child.pid)
            leave = began + limit
            while time.monotonic() < leave:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = child.wait(EVERY)
                    how = "exit" if status >= 0 else "signal"
                    break
                shared.look(_tree(child.pid))
                leave = min(leave, time.monotonic() + LEAVE) if over() else leave
            if how == "timeout":
                _ask_for_stacks(child, mark)
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
    """Around a run: somebody ends it if this process does not come to it."""
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


def _tell(watcher: subprocess.Popen[bytes], session: int) -> None:
    """Whose session it is."""
    with contextlib.suppress(OSError):
        assert watcher.stdin is not None
        watcher.stdin.write(f"{session}\n".encode())
        watcher.stdin.flush()


def watch(mark: str) -> None:
    """The watcher: wait for the pipe, which tells the child's session; if it closes without `done`, end the run."""
    said = sys.stdin.buffer.read().split()
    if said[-1:] != [b"done"]:
        end(mark, int(said[0]) if said else None)


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of ours."""
    return [sys.executable, "-X", "faulthandler", "-m", module, *arguments]


def end(mark: str, session: int | None = None) -> list[str]:
    """End every process of a run, and of its child's session; names those that would not go."""
    for _ in range(5):  # one may have been starting another
        left = _marked(mark, session)
        if not left:
            return []
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
    return [name_of(process) for process in _marked(mark, session)]


def _ask_for_stacks(child: subprocess.Popen, mark: str) -> None:
    """Let the processes that hang say in the log where: SIGABRT makes Python print the stacks of all threads."""
    for process in _marked(mark, child.pid):
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(3)


def _ours(process: psutil.Process, mark: str, session: int | None) -> bool:
    """By its environment, or by its session: a program that gives itself a title, as vLLM's processes do, writes over its environment."""
    return process.environ().get(MARK) == mark or (
        session is not None and os.getsid(process.pid) == session
    )


def _marked(mark: str, session: int | None = None) -> list[psutil.Process]:
    """The processes of a run, zombies left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if _ours(process, mark, session) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _wait(mark: str, session: int) -> None:
    limit = time.monotonic() + GRACE
    while _marked(mark, session) and time.monotonic() < limit:
        time.sleep(0.1)


def _tree(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


if __name__ == "__main__":
    watch(sys.argv[1])
