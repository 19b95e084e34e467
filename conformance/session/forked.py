# SPDX-License-Identifier: Apache-2.0
"""What a worker does that a warm process has forked.

It first becomes like a process that the controller had started: working directory, environment,
import path, and standard streams are the controller's.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Mapping, Sequence

from kvconform.process.wire import Message


def work(message: Message, fds: Sequence[int], environment: Mapping[str, str | None]) -> None:
    """Serve execnet at the standard streams, as the interpreters do that xdist starts.

    `environment`: variables that importing vLLM has set, which this process did not do itself.
    """
    become(message, fds)
    add(environment)
    draw_afresh()
    first = sys.stdin.readline()
    if first:  # otherwise the controller has ended
        exec(eval(first))


def draw_afresh() -> None:
    """Seed numpy's generator, as in a new interpreter; Python does that to its own in each fork.

    Otherwise all workers would draw the same numbers, and connectors name by them what others see.
    """
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()


def add(environment: Mapping[str, str | None]) -> None:
    """Set environment variables, and remove those that are None."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def become(message: Message, fds: Sequence[int]) -> None:
    """Take on the client's working directory, environment, import path and streams."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False, buffering=1)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1, errors="backslashreplace")
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    os.umask(message["umask"])
    os.chdir(message["cwd"])
    os.environ.clear()
    os.environ.update(message["environment"])
    sys.path[:] = message["path"]
    sys.argv[:] = message["arguments"]
    # Otherwise processes that are started by `spawn` would import the server.
    sys.modules["__main__"] = types.ModuleType("__main__")
    importlib.invalidate_caches()
