# SPDX-License-Identifier: Apache-2.0
"""Files that the workers of an engine share in vLLM, where all of them are in one process.

vLLM's SharedOffloadRegion maps one file in every worker. The worker that made it waits at a barrier
until the others have mapped it, and then removes its name. Here the workers start one after the
other, and none of them waits.

In vLLM, each worker's mapping is in a process of its own. Here the mapping of one worker may follow
that of another in memory, and a copy behind the first would change the second.
"""

from __future__ import annotations

import math
import mmap
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from vllm.distributed import parallel_state

ATTEMPTS = 8
"""How many times a file is mapped, at most, until free memory follows the mapping."""


class Files:
    """Stands for the module `os`: keeps the name of a file until the last worker has opened it."""

    def __init__(self) -> None:
        self._opened: Counter[str] = Counter()
        self._removed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, *options: Any) -> int:
        """See os.open."""
        descriptor = os.open(path, *options)
        self._opened[path] += 1
        self._remove(path)
        return descriptor

    def unlink(self, path: str) -> None:
        """See os.unlink. Waits for the workers that have not opened the file yet."""
        self._removed.add(path)
        self._remove(path)

    def _remove(self, path: str) -> None:
        if path in self._removed and self._opened[path] >= _workers():
            self._removed.discard(path)
            del self._opened[path]
            os.unlink(path)

    def restore(self) -> None:
        """Remove what still waits."""
        for path in self._removed:
            with suppress(FileNotFoundError):
                os.unlink(path)


class Mappings:
    """Stands for the module `mmap`: behind each mapping, as much memory as it has is kept free.

    `guard(start, end)` is called with the addresses of that memory.
    """

    def __init__(self, guard: Callable[[int, int], None]) -> None:
        self._guard = guard
        self._kept: list[mmap.mmap] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(mmap, name)

    def mmap(self, descriptor: int, length: int, **options: Any) -> mmap.mmap:
        """See mmap.mmap."""
        # The kernel places a mapping below the one before it, unless it finds room elsewhere.
        made: list[mmap.mmap] = []
        for _ in range(ATTEMPTS):
            behind = mmap.mmap(-1, length)
            found = mmap.mmap(descriptor, length, **options)
            self._kept.append(behind)
            end = _address(found) + len(found)
            if _address(behind) == end:
                self._guard(end, end + len(behind))
                break
            made.append(found)
        else:
            found = made.pop()
        for each in made:
            each.close()
        return found

    def restore(self) -> None:
        """Release the memory behind the mappings."""
        for each in self._kept:
            each.close()


def _workers() -> int:
    """Return how many workers the engine has that is driven now."""
    state: Any = parallel_state
    return math.prod(getattr(group, "world_size", 1) for group in (state._TP, state._PP))


def _address(mapped: mmap.mmap) -> int:
    return int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
