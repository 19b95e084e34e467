# SPDX-License-Identifier: Apache-2.0
"""The warm server: a process that has vLLM and kvconform imported, and forks for each run.

`python -m kvconform.watch.server SOCKET`. It never imports a connector, so that each run imports
the connector as it is then. It has one thread, because a fork has one. A client asks for the run;
the process that controls the run asks for its workers, and for their replacements.
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
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from kvconform.contract import loader
from kvconform.contract.loader import Spec
from kvconform.watch import wire
from kvconform.watch.forked import control, peek, work
from kvconform.watch.imported import Imported
from kvconform.watch.wire import Message

IDLE = 900.0
"""Seconds without a run after which the server ends."""
IDLE_SECONDS = "KVCONFORM_SERVER_IDLE"
"""Environment variable: another number of seconds."""
PATIENCE = 5.0
"""Seconds that a client has for sending its request."""
MODULES = (
    "compat.vllm_api",
    "run.case",
    "run.smoke",
    "run.promises",
    "run.runner",
    "refimpl.scheduler",
    "session.launch",
    "session.plugin",
    "session.worker",
    "watch.gateways",
)
"""Modules of kvconform that every run needs; their imports come with them."""
TOOLS = ("_pytest.junitxml", "xdist.remote", "xdist.plugin", "xdist.dsession", "xdist.workermanage")


class Server:
    """Listens on a socket and forks; one instance a process.

    `path`: the socket. `idle`: seconds without a run after which it ends.
    """

    def __init__(self, path: Path, idle: float) -> None:
        self._path = path
        self._idle = idle
        # Workers are asked for here, because `path` may be another server's by then.
        self._inner = path.with_name(f"{path.stem}.{os.getpid()}.sock")
        self._listeners: list[socket.socket] = []
        self._inode = 0
        self._children: dict[int, socket.socket | None] = {}
        self._environment: dict[str, str | None] = {}
        self._imported: Imported
        self._stale: str | None = None
        self._used = time.monotonic()

    def warm(self) -> None:
        """Import what every run needs, and load the specification."""
        before = dict(os.environ)
        for name in (*(f"kvconform.{each}" for each in MODULES), *TOOLS):
            importlib.import_module(name)
        # Some variables are set by the imports: a worker needs them, too.
        self._environment = {
            name: os.environ.get(name)
            for name in {*before, *os.environ}
            if before.get(name) != os.environ.get(name)
        }
        _exercise(loader.load_spec())
        self._imported = Imported()
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Answer requests until the server is idle or stale, or is asked to end."""
        self._listeners = [_listen(self._inner), _listen(self._path)]
        self._inode = self._path.stat().st_ino
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while not self._is_over():
                for key, _ in selector.select(timeout=min(5.0, self._idle)):
                    if key.fd == woken:
                        os.read(woken, 4096)
                    else:
                        self._accept(key.fileobj)  # type: ignore[arg-type]
                self._reap()
        self._close()

    def _is_over(self) -> bool:
        if self._children:
            return False
        unused = time.monotonic() - self._used > self._idle
        return unused or self._stale is not None or not self._owns_path()

    def _owns_path(self) -> bool:
        """Return whether the socket's file is still this server's: another one may replace it."""
        with contextlib.suppress(OSError):
            return self._path.stat().st_ino == self._inode
        return False

    def _close(self) -> None:
        """Remove the sockets; `path` only if it is still this server's."""
        if self._owns_path():
            self._path.unlink(missing_ok=True)
        self._inner.unlink(missing_ok=True)
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(PATIENCE)
        fds: list[int] = []
        try:
            if not wire.is_own(connection):
                return
            message, fds = wire.receive(connection)
            connection.settimeout(None)
            self._answer(connection, message, fds)
        except (OSError, EOFError, ValueError, KeyError):
            pass  # a client that is gone, or that is none
        finally:
            for fd in fds:
                os.close(fd)
            if connection not in self._children.values():
                connection.close()

    def _answer(self, connection: socket.socket, message: Message, fds: list[int]) -> None:
        what = message["what"]
        if what == "end":
            self._stale = "(it was asked to end)"
        elif what == "work":
            pid = self._fork(lambda: work(message, fds, self._environment))
            self._children[pid] = connection
            wire.send(connection, {"pid": pid})
        elif what == "run":
            self._stale = self._stale or self._imported.changed()
            if self._stale is not None:
                wire.send(connection, {"stale": self._stale})
                return
            inner = self._inner
            if message["only"]:
                pid = self._fork(lambda: peek(message, fds, connection, self._environment))
            else:
                pid = self._fork(lambda: control(message, fds, connection, inner))
            self._children[pid] = None
        self._used = time.monotonic()

    def _fork(self, body: Callable[[], None]) -> int:
        """Run `body` in a forked process, and return the process's id."""
        pid = os.fork()
        if pid:
            return pid
        status = 70
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()  # a connector may end its whole group
            for listener in self._listeners:
                listener.close()
            for other in filter(None, self._children.values()):
                other.close()
            body()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            _leave(status)

    def _reap(self) -> None:
        """Collect the processes that have ended, and report those of workers."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                connection = self._children.pop(pid, None)
                self._used = time.monotonic()
                if connection is not None:
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
    from kvconform.report.html.story import story_of
    from kvconform.session import crash

    vllm_api.build_config(block_size=16, num_blocks=16)
    selection = select(spec, Settings(), check_vllm()[0])
    variant = selection.variants[0]
    rows = crash.rows_of(None, variant, spec, selection, {}, strict=False)
    CaseReport.from_dict(CaseReport(variant.id, rows=rows).to_dict())
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


def _listen(path: Path) -> socket.socket:
    """Return a socket that listens at `path`, with mode 0600. Replaces what lies there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    before = os.umask(0o177)
    try:
        listener.bind(str(scratch))
    finally:
        os.umask(before)
    listener.listen()
    os.replace(scratch, path)
    return listener


def main(path: str) -> int:
    """Run the server. Its socket is there as soon as vLLM is imported."""
    idle = float(os.environ.get(IDLE_SECONDS) or IDLE)
    server = Server(Path(path), idle)
    server.warm()
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
