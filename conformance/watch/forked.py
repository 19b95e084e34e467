# SPDX-License-Identifier: Apache-2.0
"""What the processes do that the warm server forks: control a run, or work for one.

Each first becomes like a process that the client had started: working directory, environment,
import path, and standard streams are the client's.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvconform.watch import wire
from kvconform.watch.wire import Message


def control(message: Message, fds: Sequence[int], client: socket.socket, path: Path) -> None:
    """Control a run, as `kvconform run` does; workers come from the server at `path`.

    Sends the client its own process id, with `listen` the result of each run, and at last the exit
    code, or the error that ended the run.
    """
    with _for_client(message, fds, client) as last:
        last |= _controlled(message, client, path)


def peek(
    message: Message,
    fds: Sequence[int],
    client: socket.socket,
    environment: Mapping[str, str | None],
) -> None:
    """Make a few runs in this process, without reports: `only` names them.

    With `known`, the connector's capabilities are those.

    Sends the result of each run, and at last that they are done; no more if the process dies.
    """
    with _for_client(message, fds, client) as last:
        _add(environment)
        last |= _peeked(message, client)


@contextlib.contextmanager
def _for_client(message: Message, fds: Sequence[int], client: socket.socket) -> Iterator[Message]:
    """Tell the client this process's id, end when it goes, and send it what the body filled in."""
    _become(message, fds)
    wire.send(client, {"pid": os.getpid()})
    over = threading.Event()
    threading.Thread(target=_end_with, args=(client, over), daemon=True).start()
    last: Message = {}
    try:
        yield last
    finally:
        over.set()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with contextlib.suppress(OSError):
        wire.send(client, last)


def _peeked(message: Message, client: socket.socket) -> Message:
    """Make the runs, and return the last message for the client."""
    from kvconform.compat.installed import check_vllm
    from kvconform.config.settings import Settings
    from kvconform.errors import KvconformError
    from kvconform.judge.records import CaseReport
    from kvconform.process import watchdog
    from kvconform.run import calibration
    from kvconform.session.worker import Worker
    from kvconform.watch.results import result_of

    scratch = Path(message["scratch"])
    try:
        settings = Settings.model_validate(message["settings"])
        worker = Worker(settings, check_vllm()[0], scratch, "peek", scratch)
    except KvconformError as error:
        return {"error": error.message, "exit": error.code}
    if message["known"] is not None:
        calibration.assume(settings.connector, *message["known"])
    variants = {variant.id: variant for variant in worker.selection.variants}
    worker.pytest_sessionstart()
    try:
        for name in message["only"]:
            if name not in variants:
                continue
            report = CaseReport.from_dict(json.loads(worker.judge(variants[name])))
            if report.abort is not None:
                return {"error": report.abort[1], "exit": report.abort[0]}
            wire.send(client, {"result": result_of(report, {}, 0.0)})
            if watchdog.has_expired():
                break  # what the hook has left behind could disturb the next run
    finally:
        worker.pytest_sessionfinish()
    return {"exit": 0}


def _controlled(message: Message, client: socket.socket, path: Path) -> Message:
    """Run and judge, and return the last message for the client."""
    from kvconform.config.settings import Settings
    from kvconform.errors import KvconformError
    from kvconform.session import launch
    from kvconform.watch import gateways
    from kvconform.watch.results import result_of

    def listen(*found: Any) -> None:
        with contextlib.suppress(OSError):
            wire.send(client, {"result": result_of(*found)})

    settings = Settings.model_validate(message["settings"])
    options: dict[str, Any] = {}
    if message["listen"]:
        options = {
            "listener": listen,
            "quiet": True,
            "first": message["first"],
            "traced": message["traced"],
            "untraced": message["untraced"],
        }
    gateways.fork_workers_at(path)
    try:
        return {"exit": launch.run(settings, **options)}
    except KvconformError as error:
        return {"error": error.message, "exit": error.code}
    except KeyboardInterrupt:
        return {"error": "interrupted", "exit": 3}
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        sentence = f"internal error, {type(error).__name__}: {first} (--no-server --debug shows it)"
        return {"error": sentence, "exit": 3}


def _end_with(client: socket.socket, over: threading.Event) -> None:
    """End this process's run when the client is gone."""
    with contextlib.suppress(OSError, EOFError):
        wire.receive(client)
    if not over.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def work(message: Message, fds: Sequence[int], environment: Mapping[str, str | None]) -> None:
    """Serve execnet at the standard streams, as the interpreters do that xdist starts.

    `environment`: variables that importing vLLM has set, which this process did not do itself.
    """
    _become(message, fds)
    _add(environment)
    exec(eval(sys.stdin.readline()))


def _add(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _become(message: Message, fds: Sequence[int]) -> None:
    """Take on the client's working directory, environment, import path and streams."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
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
    # A second edit in the same second, of the same length, would get the bytecode of the first one.
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
