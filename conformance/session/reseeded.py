# SPDX-License-Identifier: Apache-2.0
"""A process with another hash seed that forks for runs, so that none of them imports vLLM.

`python -m kvconform.session.reseeded DESCRIPTOR` listens at a socket that it inherits; with
`--late`, it imports vLLM when the first run is asked for. kvconform.run.isolation asks for the
runs. The process ends with the one that started it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from pathlib import Path

from kvconform.process import wire
from kvconform.process.supervisor import dies_with_parent
from kvconform.process.wire import Message
from kvconform.run import child
from kvconform.session.forked import add, become, draw_afresh
from kvconform.session.warm import Warm


class Reseeded(Warm):
    """Forks for the runs that are asked for at a socket; one instance a process."""

    def listen(self, listener: socket.socket) -> None:
        """Answer requests until this process is ended."""
        self.wait_for(listener, lambda: self.accept(listener, self._answer))
        self.serve()

    def is_over(self) -> bool:
        """Return False: the process that started this one ends it."""
        return False

    def _answer(self, connection: socket.socket, message: Message, fds: list[int]) -> None:
        """Fork for a run; its process is killed when the client is gone."""
        pid = self.fork(lambda: self._run(message, fds), connection)
        self.wait_for(connection, lambda: self._is_gone(connection, pid))
        with contextlib.suppress(OSError):
            wire.send(connection, {"pid": pid})

    def _is_gone(self, connection: socket.socket, pid: int) -> None:
        """Kill the processes of a client that has closed its end."""
        self._selector.unregister(connection)
        for kill in (os.kill, os.killpg):  # it may not lead its group yet
            with contextlib.suppress(OSError):
                kill(pid, signal.SIGKILL)

    def _run(self, message: Message, fds: list[int]) -> None:
        """Make the run of a request, in a forked process."""
        become(message, fds)
        add(self.environment)
        draw_afresh()
        child.main(Path(message["folder"]))


def main(descriptor: int, *, late: bool) -> None:
    """Import vLLM, and answer the requests that come meanwhile and later.

    `late`: wait with the import for the first request.
    """
    dies_with_parent()
    listener = socket.socket(fileno=descriptor)
    if late:
        first = select.poll()  # unlike select, for any number of open files
        first.register(listener, select.POLLIN)
        first.poll()
    server = Reseeded()
    server.warm()
    server.settle()
    server.listen(listener)


if __name__ == "__main__":
    main(int(sys.argv[1]), late="--late" in sys.argv)
