# SPDX-License-Identifier: Apache-2.0
"""Messages between a process that forks and its clients: JSON objects, some with descriptors.

Both sides belong to one user, and check that by the credentials of the other side's process.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
MOST_FDS = 4


def send(connection: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message, and copies of file descriptors. OSError if the other side is gone."""
    data = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], list(fds))
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Message, list[int]]:
    """Return a message and the file descriptors that came with it.

    EOFError if the other side is gone.
    """
    head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, MOST_FDS)
    for fd in fds:
        os.set_inheritable(fd, False)
    if len(head) < _LENGTH.size:
        head += _exactly(connection, _LENGTH.size - len(head))
    found: Message = json.loads(_exactly(connection, *_LENGTH.unpack(head)))
    return found, fds


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def request_of(what: str) -> Message:
    """Return a request with all that makes a process like this one."""
    mask = os.umask(0o077)
    os.umask(mask)
    return {
        "what": what,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "path": sys.path,
        "arguments": sys.argv,
        "umask": mask,
    }


def peer_of(connection: socket.socket) -> tuple[int, int] | None:
    """Return process and user at the other end, or None where the system does not say."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    data = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user


def is_own(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user.

    True where the system does not say; then the mode of the socket's directory alone protects it.
    """
    peer = peer_of(connection)
    return peer is None or peer[1] == os.getuid()
