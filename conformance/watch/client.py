# SPDX-License-Identifier: Apache-2.0
"""The client of the warm server: finds it, starts it, and has it make a run."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

# Sets variables that tell servers apart; a process that imports vLLM has them.
import kvconform.compat.environment  # noqa: F401
from kvconform.config.settings import Settings
from kvconform.errors import EnvironmentProblem, KvconformError
from kvconform.process import wire
from kvconform.process.wire import Message
from kvconform.session.gateways import environment_of, findable, start_limit, unfit
from kvconform.watch import place

Known = tuple[dict[str, Any], dict[str, str]]
"""A connector's capabilities, and where each came from."""


class Stale(Exception):
    """The server has imported a file that was changed since; the file's path."""


class Gone(Exception):
    """No server listens, or it ended before it took the request."""


class Interrupted(Exception):
    """The run was ended before it was done; `connection` is closed once its process has ended."""

    connection: socket.socket


class HasFileno(Protocol):
    """Something that `select` can wait for."""

    def fileno(self) -> int:
        """Return the descriptor."""
        ...


class Died(EnvironmentProblem):
    """The process that made or controlled the run died."""

    def __init__(self) -> None:
        super().__init__(
            "the process that controlled the run died, and it is unknown why "
            "(--no-server makes the run in this process)"
        )


def path_for(settings: Settings) -> Path:
    """Return the path of the socket of the server for this run."""
    return place.socket_of(environment_of(settings))


def connect(path: Path) -> socket.socket:
    """Return a connection to the server at `path`. Gone if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
        if wire.is_own(connection):
            return connection
    except OSError:
        pass
    connection.close()
    raise Gone


def is_small(settings: Settings) -> bool:
    """Return whether importing vLLM takes much of a run with this selection."""
    named = settings.select or settings.cases or settings.trace
    return bool(named) or settings.profile == "smoke"


def run_if_warm(settings: Settings) -> int | None:
    """Make a small run through a server that is there already; None if it was not made.

    Says on standard error that a server is used, or why it is not. Raises KvconformError if the run
    could not be completed.
    """
    if unfit(settings) is not None or not is_small(settings):
        return None
    try:
        path = path_for(settings)
        return run(settings, path, note=lambda sentence: print(sentence, file=sys.stderr))
    except place.NotPrivate:
        return None
    except Gone:
        return None
    except Stale as stale:
        print(f"kvconform: the warm server is out of date: {stale} was changed", file=sys.stderr)
        return None


def run(
    settings: Settings,
    path: Path,
    *,
    first: Sequence[str] = (),
    traced: Sequence[str] = (),
    untraced: Sequence[str] = (),
    only: Sequence[str] = (),
    known: Known | None = None,
    scratch: Path | None = None,
    listener: Callable[[Message], None] | None = None,
    until: HasFileno | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> int:
    """Have the server at `path` make a run, and return the run's exit code.

    With a `listener`, nothing is printed: it gets the result of each run (`results.Result`).
    `first`, `traced` and `untraced` are those of `session.launch.run`. With `only`, just these runs
    are made, in one process, whose files are below `scratch`, and there are no reports; its
    capabilities are those of `known`, if that is given. `until`: the run ends early when this is
    readable. `note` gets a sentence when the run begins.

    Raises Gone and Stale if the run did not begin, Interrupted if it ended early, Died if its
    process ended before it was done, and KvconformError if it could not be completed.
    """
    request = wire.request_of("run") | {
        "settings": settings.model_dump(mode="json"),
        "listen": listener is not None,
        "first": list(first),
        "traced": list(traced),
        "untraced": list(untraced),
        "only": list(only),
        "known": known,
        "scratch": str(scratch),
    }
    sys.stdout.flush()
    connection = connect(path)
    try:
        wire.send(connection, request, [0, 1, 2])
        began, _ = wire.receive(connection)
    except (OSError, EOFError):
        connection.close()
        raise Gone from None
    if "stale" in began:
        connection.close()
        raise Stale(began["stale"])
    note("kvconform: through the warm server (--no-server does without)")
    if listener is None:
        with contextlib.closing(connection), _handing_on(began["pid"]):
            last = _last(connection, None, None)
    else:
        last = _listened(connection, began["pid"], listener, until)
    if "error" in last:
        error = KvconformError(last["error"])
        error.code = last["exit"]
        raise error
    return int(last["exit"])


def _listened(
    connection: socket.socket,
    pid: int,
    listener: Callable[[Message], None],
    until: HasFileno | None,
) -> Message:
    """Return the last message of a run, or end the run when `until` is readable, or by Ctrl-C."""
    try:
        last = _last(connection, listener, until)
    except Interrupted as interrupted:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
        interrupted.connection = connection
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
        drain(connection)
        raise
    connection.close()
    return last


def drain(connection: socket.socket, until: HasFileno | None = None) -> None:
    """Wait for the end of a run that was interrupted, and close its connection.

    Interrupted again if `until` is readable before.
    """
    try:
        while True:
            _last(connection, None, until)
    except Interrupted as interrupted:
        interrupted.connection = connection
        raise
    except Died:
        connection.close()


def _last(
    connection: socket.socket,
    listener: Callable[[Message], None] | None,
    until: HasFileno | None,
) -> Message:
    """Return the last message of a run; hand its results to the listener."""
    waited = [connection] if until is None else [connection, until]
    while True:
        if until in select.select(waited, [], [])[0]:
            raise Interrupted
        try:
            message, _ = wire.receive(connection)
        except (OSError, EOFError):
            raise Died from None
        if "result" not in message:
            return message
        if listener is not None:
            listener(message["result"])


@contextlib.contextmanager
def _handing_on(pid: int) -> Iterator[None]:
    """Hand SIGINT and SIGTERM on to the process that controls the run, which cleans up."""

    def hand_on(number: int, _: object) -> None:
        with contextlib.suppress(OSError):
            os.kill(pid, number)

    before = {each: signal.signal(each, hand_on) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def end(path: Path) -> None:
    """Ask the server at `path`, if there is one, to end after its present runs."""
    with contextlib.suppress(Gone, OSError), contextlib.closing(connect(path)) as connection:
        wire.send(connection, {"what": "end"})
        connection.recv(1)


def start(settings: Settings, path: Path) -> None:
    """Start a server at `path`, in place of what is there, and wait until it has imported vLLM.

    EnvironmentProblem if it does not start.
    """
    place.make_directory()
    path.unlink(missing_ok=True)
    log = path.with_suffix(".log")
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvconform.watch.server", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=findable(environment_of(settings), sys.path),
            start_new_session=True,
        )
    limit = start_limit()
    until = time.monotonic() + limit
    while not _listens(path):
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            why = lines[-1] if lines else f"it did not import vLLM within {limit:g} s"
            raise EnvironmentProblem(f"the warm server did not start: {why} (all of it: {log})")
        time.sleep(0.02)


def _listens(path: Path) -> bool:
    try:
        connect(path).close()
    except Gone:
        return False
    return True
