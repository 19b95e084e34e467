# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, for this process: no file of its can be written beyond a limit.

The limit is the system's (RLIMIT_FSIZE, `ulimit -f`), so it holds for libraries in other languages,
too. A write up to it is cut short, and one beyond it fails with EFBIG. Reads, pipes and memory are
not affected.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvconform.process import alive


def sizes(folder: Path) -> list[int]:
    """Return the bytes of each regular file below `folder`."""
    found = []
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(parent, name))
                if stat.S_ISREG(status.st_mode):
                    found.append(status.st_size)
    return found


@contextmanager
def full(limit: int) -> Iterator[None]:
    """Let every write beyond `limit` bytes of a file fail, in all threads of this process.

    What the process prints meanwhile is not lost where its streams are files.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with _streams_through_pipes():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def _streams_through_pipes() -> Iterator[None]:
    """Write standard output and error through processes, whose files may grow."""
    pipes: list[subprocess.Popen[bytes]] = []
    saved: dict[int, int] = {}
    try:
        with alive.of_harness():
            for number in (1, 2):
                if stat.S_ISREG(os.fstat(number).st_mode):
                    saved[number] = os.dup(number)
                    pipe = subprocess.Popen(
                        [shutil.which("cat") or "cat"], stdin=subprocess.PIPE, stdout=number
                    )
                    pipes.append(pipe)
                    _flush()
                    assert pipe.stdin is not None
                    os.dup2(pipe.stdin.fileno(), number)
        yield
    finally:
        _flush()
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)
        for pipe in pipes:
            try:
                pipe.communicate(timeout=5)
            except subprocess.TimeoutExpired:  # a process that the connector started prints on
                pipe.kill()
                pipe.wait()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
