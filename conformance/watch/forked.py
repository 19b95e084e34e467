# SPDX-License-Identifier: Apache-2.0
"""What the processes do that the warm server forks for its clients: control a run, or repeat some.

Each first becomes like a process that the client had started (kvconform.session.forked).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvconform.process import wire
from kvconform.process.wire import Message
from kvconform.session.forked import add, become


def control(
    message: Message, fds: Sequence[int], client: socket.socket, channel: socket.socket
) -> None:
    """Control a run, as `kvconform run` does; workers come from the server, through `channel`.

    Sends the client its own process id, with `listen` the result of each run, and at last the exit
    code, or the error that ended the run.
    """
    with _for_client(message, fds, client) as last:
        last |= _controlled(message, client, channel)


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
        add(environment)
        last |= _peeked(message, client)


@contextlib.contextmanager
def _for_client(message: Message, fds: Sequence[int], client: socket.socket) -> Iterator[Message]:
    """Tell the client this process's id, end when it goes, and send it what the body filled in."""
    become(message, fds)
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
    from kvconform.process import watchdog
    from kvconform.report.compact import restored
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
            report = restored(json.loads(worker.judge(variants[name])), worker.requirements)
            if report.abort is not None:
                return {"error": report.abort[1], "exit": report.abort[0]}
            wire.send(client, {"result": result_of(report, {}, 0.0)})
            if watchdog.has_expired():
                break  # what the hook has left behind could disturb the next run
    finally:
        worker.pytest_sessionfinish()
    return {"exit": 0}


def _controlled(message: Message, client: socket.socket, channel: socket.socket) -> Message:
    """Run and judge, and return the last message for the client."""
    from kvconform.config.settings import Settings
    from kvconform.errors import KvconformError
    from kvconform.session import launch
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
    try:
        return {"exit": launch.run(settings, channel=channel, **options)}
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
