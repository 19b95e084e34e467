# SPDX-License-Identifier: Apache-2.0
"""The warm server: a process that has vLLM and kvconform imported, and forks for each run.

`python -m kvconform.watch.server SOCKET`. A client asks for the run; the process that controls the
run asks for its workers, and for their replacements.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path

from kvconform.process import wire
from kvconform.process.wire import Message
from kvconform.run.isolation import RESEEDED
from kvconform.session.gateways import reseeded_server
from kvconform.session.warm import Warm
from kvconform.watch.forked import control, peek
from kvconform.watch.imported import Imported

IDLE = 900.0
"""Seconds without a run after which the server ends."""
IDLE_SECONDS = "KVCONFORM_SERVER_IDLE"
"""Environment variable: another number of seconds."""
MODULES = (
    "kvconform.session.launch",
    "xdist.plugin",
    "xdist.dsession",
    "xdist.workermanage",
)
"""Modules that every controller needs."""


class Server(Warm):
    """Listens on a socket and forks; one instance a process.

    `path`: the socket. `idle`: seconds without a run after which it ends. Another
    process forks for the runs that need another hash seed.
    """

    def __init__(self, path: Path, idle: float) -> None:
        super().__init__()
        self._path = path
        self._idle = idle
        self._inode = 0
        self._imported: Imported
        self._stale: str | None = None
        self._last = time.monotonic()

    def remember(self) -> None:
        """Compare what is imported now with the files before each run."""
        self._imported = Imported()

    def listen(self) -> None:
        """Answer requests until the server is idle or stale, or is asked to end."""
        # A second edit in the same second, of the same length, would get the first one's bytecode.
        sys.dont_write_bytecode = True
        listener = _listen(self._path)
        self._inode = self._path.stat().st_ino
        self._last = time.monotonic()  # importing vLLM was no idle time
        self.wait_for(listener, lambda: self.accept(listener, self._answer))
        with reseeded_server(os.environ, late=True):
            self.environment[RESEEDED] = os.environ.get(RESEEDED)
            self.serve(min(5.0, self._idle))
        if self._owns_path():
            self._path.unlink(missing_ok=True)
            self._path.with_suffix(".log").unlink(missing_ok=True)
        listener.close()

    def is_over(self) -> bool:
        """Return whether the server is not used, and is idle, stale or replaced."""
        if self.is_used():
            return False
        unused = time.monotonic() - self._last > self._idle
        return unused or self._stale is not None or not self._owns_path()

    def used(self) -> None:
        """Stay for a while from now on."""
        self._last = time.monotonic()

    def _owns_path(self) -> bool:
        """Return whether the socket's file is still this server's: another one may replace it."""
        with contextlib.suppress(OSError):
            return self._path.stat().st_ino == self._inode
        return False

    def _answer(self, connection: socket.socket, message: Message, fds: list[int]) -> None:
        with connection:
            self._do(connection, message, fds)

    def _do(self, connection: socket.socket, message: Message, fds: list[int]) -> None:
        what = message["what"]
        if what == "end":
            self._stale = "(it was asked to end)"
        elif what == "run":
            self._stale = self._stale or self._imported.changed()
            if self._stale is not None:
                wire.send(connection, {"stale": self._stale})
                return
            if message["only"]:
                self.fork(lambda: peek(message, fds, connection, self.environment))
            else:
                self._fork_controller(message, fds, connection)
        self.used()

    def _fork_controller(self, message: Message, fds: list[int], connection: socket.socket) -> None:
        """Fork the controller of a run, which gets its workers through a channel of its own."""
        ours, theirs = socket.socketpair()
        self.join(ours)
        with theirs:
            self.fork(lambda: control(message, fds, connection, theirs))


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
    server.warm(*MODULES)
    server.remember()
    server.settle()
    server.listen()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
