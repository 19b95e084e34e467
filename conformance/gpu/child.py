# SPDX-License-Identifier: Apache-2.0
"""A part's process: its output goes to a file, and its processes end with it or at its limit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event

GRACE = 5
"""Seconds that processes left behind by a part have to end."""
POLL = 0.2
"""Seconds between two questions whether a command is to be ended."""
END = 30
"""Seconds for the supervisor to kill everything."""


def run(
    command: Sequence[str],
    log: Path,
    limit: float,
    environment: Mapping[str, str],
    stop: Event | None = None,
) -> int | None:
    """Run a command for at most `limit` seconds; return its status, None at its limit.

    `stop`: another thread sets it to end the command early, as at its limit.
    Its output is added to `log`. Whatever it has started ends with it (kvconform.process.supervisor
    adopts processes that leave its process group), also if an exception is raised here, and if this
    process is killed.
    """
    supervised = [sys.executable, "-m", "kvconform.process.supervisor", str(GRACE), *command]
    with log.open("ab") as output:
        output.write(("$ " + " ".join(command) + "\n").encode())
        output.flush()
        guard = subprocess.Popen(
            supervised,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        until = time.monotonic() + max(limit, 0)
        try:
            while (status := _ended(guard, min(POLL, left(until)))) is None:
                if not left(until) or (stop is not None and stop.is_set()):
                    return None
            return status
        finally:
            _kill(guard)


def _ended(guard: subprocess.Popen[bytes], limit: float) -> int | None:
    """Return the status of the supervisor, None if it has not ended within `limit` seconds."""
    try:
        return guard.wait(limit)
    except subprocess.TimeoutExpired:
        return None


def _kill(guard: subprocess.Popen[bytes]) -> None:
    """End the supervisor and all that it watches; nothing if it has ended."""
    assert guard.stdin is not None
    with contextlib.suppress(OSError):
        if guard.poll() is None:
            guard.stdin.write(b"k")
        guard.stdin.close()
    try:
        guard.wait(END)
    except subprocess.TimeoutExpired:  # the command dies with its supervisor
        guard.kill()
        guard.wait()


def last_words(log: Path, most: int = 200) -> str:
    """Return the last line of a part's output that says something; empty without one."""
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    said = [line.strip() for line in lines if line.strip() and not line.startswith("$ ")]
    return said[-1][:most] if said else ""


def left(until: float) -> float:
    """Return the seconds until a time of the monotonic clock, 0 when it has passed."""
    return max(0.0, until - time.monotonic())
