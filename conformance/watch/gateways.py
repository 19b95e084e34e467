# SPDX-License-Identifier: Apache-2.0
"""Workers of pytest-xdist that the warm server forks, in place of new interpreters."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from kvconform.watch import wire
from kvconform.watch.client import request_of


class ForkedIO(Popen2IO):
    """The pipes of a worker that the warm server has forked; stands in for execnet's of a Popen."""

    def __init__(self, path: Path, execmodel: Any) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.connect(str(path))
        fds = [theirs_in, theirs_out, 2]
        wire.send(self._server, request_of("work") | {"arguments": ["-c"]}, fds)
        os.close(theirs_in)
        os.close(theirs_out)
        self._pid = int(wire.receive(self._server)[0]["pid"])
        self._exit: int | None = None
        super().__init__(os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb"), execmodel=execmodel)

    def wait(self) -> int | None:
        """Wait for the end of the worker. Return its status, or None if the server is gone."""
        if self._exit is None:
            with contextlib.suppress(OSError, EOFError):
                self._exit = int(wire.receive(self._server)[0]["exit"])
        return self._exit

    def kill(self) -> None:
        """Kill the worker."""
        if self._exit is None:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)


def fork_workers_at(path: Path) -> None:
    """Have this process get its workers from the server at `path` from now on."""
    from xdist import workermanage

    # xdist gives its workers the import path of the moment in which it was imported itself.
    workermanage._sys_path = list(sys.path)  # type: ignore[attr-defined]
    before = gateway_io.create_io

    def create_io(spec: Any, execmodel: Any) -> Any:
        return ForkedIO(path, execmodel) if spec.popen else before(spec, execmodel)

    gateway_io.create_io = create_io
