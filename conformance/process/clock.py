# SPDX-License-Identifier: Apache-2.0
"""A clock that can be set forward, so that a lease of a minute runs out in a moment.

`advance` replaces the clocks of module `time` in this process. Names that were imported from it
before, other clocks (locks, datetime, native code) and other processes keep real time.

A monotonic clock never goes back, so what it gained stays. The wall clock is right again after each
run, because it is compared with the times of files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

monotonic = time.monotonic
"""The real clock, for the harness itself."""

_MONOTONIC = ("monotonic", "perf_counter")
_WALL = ("time",)
_REAL: dict[str, Callable[[], float]] = {
    name: getattr(time, name) for name in (*_MONOTONIC, *_WALL)
}


class _Gained:
    """Seconds that the clocks were set forward; `wall`: since the run began."""

    monotonic = 0.0
    wall = 0.0
    installed = False


def advance(seconds: float) -> None:
    """Set the clocks of this process forward."""
    _Gained.monotonic += seconds
    _Gained.wall += seconds
    if not _Gained.installed:
        _Gained.installed = True
        for name in _MONOTONIC:
            _replace(name, lambda: _Gained.monotonic)
        for name in _WALL:
            _replace(name, lambda: _Gained.wall)


def _replace(name: str, gained: Callable[[], float]) -> None:
    real, real_ns = _REAL[name], getattr(time, f"{name}_ns")
    setattr(time, name, lambda: real() + gained())
    setattr(time, f"{name}_ns", lambda: real_ns() + int(gained() * 1e9))


@contextmanager
def of_run() -> Iterator[None]:
    """Set the wall clock right again at the end of a run."""
    before = _Gained.wall
    try:
        yield
    finally:
        _Gained.wall = before
