# SPDX-License-Identifier: Apache-2.0
"""The process that releases the holds of `kvconform.kv.held`.

It is run as a file, with two descriptors: requests are read from the first, and the second is the
memory with the number of the last hold that is released, four bytes for each stream. It is a
process of its own because a thread that waits for a held stream may keep Python's lock. It imports
nothing of kvconform, so it begins in some milliseconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import struct
import sys
import time
from collections import deque

REQUEST = struct.Struct("<IId")
"""A stream's place, a hold's number, and when it is released: the monotonic clock's time; 0: now.

Holds of the stream before it are released with it. A place that no stream can have: end.
"""
MOST = 256
"""Requests that are read at once."""
PLACES = mmap.PAGESIZE // 4
END = PLACES


def serve(requests: int, memory: mmap.mmap) -> None:
    """Release holds as requests say, until one says END or the other end is closed.

    Then, and if this fails, release all.
    """
    released = (ctypes.c_uint32 * PLACES).from_buffer(memory)
    held: deque[tuple[float, int, int]] = deque()

    def release(place: int, number: int) -> None:
        released[place] = max(released[place], number)

    goes_on = True
    try:
        while goes_on:
            rest = max(0.0, held[0][0] - time.monotonic()) if held else None
            if select.select([requests], [], [], rest)[0]:
                asked = os.read(requests, MOST * REQUEST.size)
                goes_on = bool(asked)
                for place, number, when in REQUEST.iter_unpack(asked):
                    if place >= PLACES:
                        goes_on = False
                    elif when:
                        held.append((when, place, number))
                    else:
                        release(place, number)
            while held and held[0][0] <= time.monotonic():
                release(*held.popleft()[1:])
    finally:
        for _, place, number in held:
            release(place, number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the process that holds
    serve(int(sys.argv[1]), mmap.mmap(int(sys.argv[2]), mmap.PAGESIZE))
