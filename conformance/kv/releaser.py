# SPDX-License-Identifier: Apache-2.0
"""The process that releases the holds of `kvconform.kv.held`.

It is run as a file, with two descriptors: requests are read from the first, and the second is the
memory whose first four bytes are the number of the last hold that is released. It is a process of
its own because a thread that waits for a held stream may keep Python's lock. It imports nothing of
kvconform, so it begins in some milliseconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
import sys
import time
from collections import deque

REQUEST = struct.Struct("<Id")
"""A hold's number, and the time of the monotonic clock at which it is released; 0: at once.

Holds before it are released with it.
"""
MOST = 256
"""Requests that are read at once."""


def serve(requests: int, memory: mmap.mmap) -> None:
    """Release holds as requests say, until the other end is closed; then release all."""
    last = ctypes.c_uint32.from_buffer(memory)
    held: deque[tuple[int, float]] = deque()
    released = 0
    while True:
        rest = max(0.0, held[0][1] - time.monotonic()) if held else None
        if select.select([requests], [], [], rest)[0]:
            asked = os.read(requests, MOST * REQUEST.size)
            for number, when in REQUEST.iter_unpack(asked):
                if when:
                    held.append((number, when))
                else:
                    released = max(released, number)
            if not asked:
                released = max([released, *(number for number, _ in held)])
        else:
            asked = b"no end"
        now = time.monotonic()
        while held and (held[0][0] <= released or held[0][1] <= now):
            released = max(released, held.popleft()[0])
        last.value = released
        if not asked:
            return


if __name__ == "__main__":
    serve(int(sys.argv[1]), mmap.mmap(int(sys.argv[2]), mmap.PAGESIZE))
