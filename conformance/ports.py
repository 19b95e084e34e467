# SPDX-License-Identifier: Apache-2.0
"""Free TCP ports of this machine, which no two processes of ours get at the same time."""

from __future__ import annotations

import random
import socket
import sys
from contextlib import closing, suppress

from kvconform.errors import EnvironmentProblem

RANGE = range(20_000, 32_000)
"""Below the ports that systems hand out to clients, so that no connection takes one between choice and use."""
_generator = random.SystemRandom()


class Ports:
    """Ports by name. While this object is open, no other process that asks here gets them."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._locks: list[socket.socket] = []

    def choose(self, name: str) -> int:
        """The port of a name: a new one the first time. EnvironmentProblem if none is free."""
        if name not in self.numbers:
            self.numbers[name] = self._free()
        return self.numbers[name]

    def _free(self) -> int:
        for port in _generator.sample(RANGE, 200):
            if not is_free(port):
                continue
            lock = _lock(port)
            if lock is not None:
                self._locks.append(lock)
                return port
        raise EnvironmentProblem(f"no free TCP port was found between {RANGE.start} and {RANGE.stop} on 127.0.0.1")

    def renew(self, beyond: int) -> None:
        """Forget them all, and let others have them, once there are more than `beyond`."""
        if len(self.numbers) > beyond:
            self.numbers.clear()
            self.close()

    def close(self) -> None:
        """Others may have them."""
        while self._locks:
            self._locks.pop().close()


def is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind(("127.0.0.1", port))
            probe.listen(1)  # bind alone succeeds beside a listener with SO_REUSEADDR on some systems
            return True
    return False


def _lock(port: int) -> socket.socket | None:
    """Something that one process of this machine has at a time, and that goes with it: on Linux a name without a file."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform != "linux":
        return lock
    try:
        lock.bind(f"\0kvconform-port-{port}")
    except OSError:
        lock.close()
        return None
    return lock
