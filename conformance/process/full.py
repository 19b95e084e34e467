# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, for this process: it can write no file beyond a limit.

The limit is the system's (RLIMIT_FSIZE, `ulimit -f`), so it holds for libraries in other languages,
for the processes that connectors have started, and for shared memory, too. A write up to it is cut
short, and one beyond it fails with EFBIG. Reads, pipes and ordinary memory are not affected.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

from kvconform.process import alive

PATIENCE = 5.0
"""Seconds for the last output of processes that go on."""


@contextmanager
def full(limit: int) -> Iterator[None]:
    """Let every write beyond `limit` bytes of a file fail, in all threads of this process.

    What the process prints meanwhile is not lost where its streams are files.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with _streams_through_pipes(), _streams_in_memory():
        _limit(limit, hard)
        try:
            yield
        finally:
            _limit(before, hard)


def _limit(soft: int, hard: int) -> None:
    """Set the limit of this process, and of those that connectors have."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if hasattr(resource, "prlimit"):  # on Linux
        for child in alive.of_connectors().children:
            with contextlib.suppress(OSError):
                resource.prlimit(child, resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def _streams_through_pipes() -> Iterator[None]:
    """Write to descriptors 1 and 2 through processes, whose files may grow."""
    pipes: list[subprocess.Popen[bytes]] = []
    saved: dict[int, int] = {}
    program = shutil.which("cat")
    try:
        with alive.of_harness():
            for number in (1, 2):
                if program is not None and stat.S_ISREG(os.fstat(number).st_mode):
                    saved[number] = os.dup(number)
                    pipe = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=number)
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
        end = time.monotonic() + PATIENCE
        for pipe in pipes:
            try:
                pipe.communicate(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:  # a process that the connector started has it open
                pipe.kill()
                pipe.wait()


@contextmanager
def _streams_in_memory() -> Iterator[None]:
    """Keep what Python prints to files by other descriptors than 1 and 2, as under pytest."""
    kept: list[tuple[TextIO, io.StringIO]] = []
    with ExitStack() as stack:
        for stream, redirect in (
            (sys.stdout, contextlib.redirect_stdout),
            (sys.stderr, contextlib.redirect_stderr),
        ):
            if _is_another_file(stream):
                kept.append((stream, io.StringIO()))
                stack.enter_context(redirect(kept[-1][1]))
        try:
            yield
        finally:
            for stream, text in kept:
                stream.write(text.getvalue())


def _is_another_file(stream: TextIO) -> bool:
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return number not in (1, 2) and stat.S_ISREG(os.fstat(number).st_mode)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
