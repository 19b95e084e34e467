# SPDX-License-Identifier: Apache-2.0
"""A clock that can be set forward, so that a lease of a minute runs out in a moment.

The first `advance` replaces the clocks of module `time` in this process, and the names that other
modules have imported from it. The standard library (timers of locks, `datetime`), tools that
measure in real time, references other than names of modules (defaults of parameters, attributes of
classes), native code and other processes keep real time.

A monotonic clock never goes back, so what it gained stays. The wall clock is right again after each
run, because it is compared with the times of files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

monotonic = time.monotonic
"""The real clock, for the harness itself."""

_MONOTONIC = ("monotonic", "perf_counter")
_WALL = ("time",)
_REAL: dict[str, Callable[[], float]] = {
    name: getattr(time, name) for name in (*_MONOTONIC, *_WALL)
}
_REAL_NS: dict[str, Callable[[], int]] = {name: getattr(time, f"{name}_ns") for name in _REAL}
_REAL_TIME = sys.stdlib_module_names | {
    "_pytest",
    "execnet",
    "kvconform",
    "numpy",
    "pluggy",
    "pytest",
    "torch",
    "xdist",
}
"""Packages whose names keep real time: those that measure with them, or are large."""


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
        replaced: dict[int, Callable[[], float]] = {}
        for name in _MONOTONIC:
            replaced |= _replace(name, lambda: _Gained.monotonic)
        for name in _WALL:
            replaced |= _replace(name, lambda: _Gained.wall)
        for module in list(sys.modules.values()):
            _replace_imported(module, replaced)


def _replace(name: str, gained: Callable[[], float]) -> dict[int, Callable[[], float]]:
    """Replace a clock of module `time`, and the same clock in ns; return both by the replaced."""
    real, real_ns = _REAL[name], _REAL_NS[name]

    def seconds() -> float:
        return real() + gained()

    def nanoseconds() -> int:
        return real_ns() + int(gained() * 1e9)

    setattr(time, name, seconds)
    setattr(time, f"{name}_ns", nanoseconds)
    return {id(real): seconds, id(real_ns): nanoseconds}


def _replace_imported(module: object, replaced: Mapping[int, Callable[[], float]]) -> None:
    """Replace the clocks that a module has imported by name."""
    if not isinstance(module, ModuleType):
        return
    # Neither of these reads makes a lazy module load itself.
    names: dict[str, Any] = object.__getattribute__(module, "__dict__")
    if str(names.get("__name__")).partition(".")[0] in _REAL_TIME:
        return
    for name, value in list(names.items()):
        if id(value) in replaced:
            names[name] = replaced[id(value)]


@contextmanager
def of_run() -> Iterator[None]:
    """Set the wall clock right again at the end of a run."""
    before = _Gained.wall
    try:
        yield
    finally:
        _Gained.wall = before
