# SPDX-License-Identifier: Apache-2.0
"""A warm process: it has vLLM and kvconform imported, and forks the workers of runs.

`python -m kvconform.session.warm DESCRIPTOR` serves one run, whose controller has the other end of
the socket. `kvconform watch` has a server that serves many (kvconform.watch.server). A warm process
never imports a connector, and has one thread, because a fork has one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from kvconform.contract import loader
from kvconform.contract.loader import Spec
from kvconform.process import wire
from kvconform.session.forked import work

MODULES = (
    "compat.vllm_api",
    "run.case",
    "run.smoke",
    "run.promises",
    "run.runner",
    "refimpl.scheduler",
    "session.plugin",
    "session.worker",
)
"""Modules of kvconform that every worker needs; their imports come with them."""
TOOLS = ("_pytest.junitxml", "xdist.remote")
PATIENCE = 5.0
"""Seconds that a client has for sending its request."""


class Warm:
    """Forks workers for the controllers at the other ends of channels; one instance a process."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._channels: set[socket.socket] = set()
        self._children: dict[int, socket.socket | None] = {}
        self._woken, self._wake = os.pipe()
        self.environment: dict[str, str | None] = {}
        """Environment variables that were set by the imports: a worker needs them, too."""

    def warm(self, *more: str) -> None:
        """Import what every worker needs, and the modules `more`; load the specification."""
        gc.disable()  # it would take a seventh of the time, and find nothing
        before = dict(os.environ)
        for name in (*(f"kvconform.{each}" for each in MODULES), *TOOLS, *more):
            importlib.import_module(name)
        self.environment = {
            name: os.environ.get(name)
            for name in {*before, *os.environ}
            if before.get(name) != os.environ.get(name)
        }
        _exercise(loader.load_spec())

    def settle(self) -> None:
        """Exclude what is there from garbage collection, in this process and in its forks."""
        gc.freeze()
        gc.enable()

    def join(self, channel: socket.socket) -> None:
        """Fork the workers that are asked for at `channel`, until its other end is closed."""
        self._channels.add(channel)
        self.wait_for(channel, lambda: self._ordered(channel))

    def wait_for(self, what: socket.socket, act: Callable[[], None]) -> None:
        """Call `act` whenever a socket is readable."""
        self._selector.register(what, selectors.EVENT_READ, act)

    def accept(
        self,
        listener: socket.socket,
        answer: Callable[[socket.socket, wire.Message, list[int]], None],
    ) -> None:
        """Accept a client of this user, and call `answer` with its connection, request and files.

        The files are closed then; the connection is `answer`'s, unless that fails.
        """
        connection, _ = listener.accept()
        connection.settimeout(PATIENCE)
        fds: list[int] = []
        try:
            if not wire.is_own(connection):
                raise PermissionError
            message, fds = wire.receive(connection)
            connection.settimeout(None)
            answer(connection, message, fds)
        except (OSError, EOFError, ValueError, KeyError):
            connection.close()  # a client that is gone, or that is none
        finally:
            for fd in fds:
                os.close(fd)

    def serve(self, patience: float | None = None) -> None:
        """Answer requests until it is over; that is seen within `patience` seconds."""
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(
            self._woken, selectors.EVENT_READ, lambda: os.read(self._woken, 4096)
        )
        while not self.is_over():
            for key, _ in self._selector.select(patience):
                key.data()
            self._reap()

    def is_over(self) -> bool:
        """Return whether there is nothing left to do."""
        return not self.is_used()

    def is_used(self) -> bool:
        """Return whether a controller or a forked process is there."""
        return bool(self._channels or self._children)

    def used(self) -> None:
        """Note that there was a request, or that a forked process has ended."""

    def _ordered(self, channel: socket.socket) -> None:
        """Fork a worker for the controller at a channel; if that fails, close its descriptors."""
        fds: list[int] = []
        try:
            message, fds = wire.receive(channel)
            *streams, reply = fds
        except (OSError, EOFError, ValueError):
            self._selector.unregister(channel)
            self._channels.discard(channel)
            channel.close()
            return
        connection = socket.socket(fileno=reply)
        try:
            pid = self.fork(lambda: work(message, streams, self.environment), connection)
        except OSError:
            connection.close()
        else:
            with contextlib.suppress(OSError):
                wire.send(connection, {"pid": pid})
        finally:
            for fd in streams:
                os.close(fd)
        self.used()

    def fork(self, body: Callable[[], None], connection: socket.socket | None = None) -> int:
        """Run `body` in a forked process, and return the process's id.

        `connection` gets the exit status, and is closed then. OSError if the system has no room for
        another process.
        """
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise the forked process would write it again
        pid = os.fork()
        if pid:
            self._children[pid] = connection
            return pid
        status = 70
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()  # a connector may end its whole group
            self._forget(connection)
            body()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            _leave(status)

    def _forget(self, connection: socket.socket | None) -> None:
        """Close the descriptors that are the server's, in a forked process."""
        sockets: set[object] = {key.fileobj for key in self._selector.get_map().values()}
        sockets |= {*self._children.values(), connection}
        for each in sockets:
            if isinstance(each, socket.socket):
                each.close()
        os.close(self._woken)
        os.close(self._wake)
        self._selector.close()

    def _reap(self) -> None:
        """Collect the processes that have ended, and report those of workers."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                connection = self._children.pop(pid, None)
                self.used()
                if connection is not None:
                    with contextlib.suppress(KeyError):  # only some are waited for
                        self._selector.unregister(connection)
                    with contextlib.suppress(OSError):
                        wire.send(connection, {"exit": os.waitstatus_to_exitcode(status)})
                    connection.close()


def _exercise(spec: Spec) -> None:
    """Do once what is slow the first time: imports inside of vLLM, checks, and JSON models.

    None of it starts threads: no part of vLLM is constructed but a configuration.
    """
    from kvconform.compat import vllm_api
    from kvconform.compat.installed import check_vllm
    from kvconform.config.selection import select
    from kvconform.config.settings import Settings
    from kvconform.judge.records import CaseReport
    from kvconform.report.compact import compacted, judged_of, restored
    from kvconform.report.html.story import story_of
    from kvconform.session import crash

    vllm_api.build_config(block_size=16, num_blocks=16)
    selection = select(spec, Settings(), check_vllm()[0])
    variant = selection.variants[0]
    rows = crash.rows_of(None, variant, spec, selection, {}, strict=False)
    judged = judged_of(spec.requirements, selection.judged)
    restored(compacted(CaseReport(variant.id, rows=rows), judged), judged)
    story_of([], rows)


def _leave(status: int) -> NoReturn:
    """End a forked process: the connector's exit handlers run, as at the end of a program."""
    import atexit
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def main(descriptor: int) -> None:
    """Serve the controller at the other end of a socket, until it and its workers have ended."""
    server = Warm()
    server.join(socket.socket(fileno=descriptor))
    server.warm()
    server.settle()
    server.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
