# SPDX-License-Identifier: Apache-2.0
"""Threads that an exception has ended. Python prints the exception, and nobody waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvconform.contract.events import thread_died
from kvconform.contract.trace import Trace


@dataclass
class _Deaths:
    """Deaths of one run, not emitted yet: the step of the engine, thread's name and exception."""

    trace: Trace
    connector: type
    hook: Callable[[threading.ExceptHookArgs], object]
    """What prints an exception."""
    found: list[tuple[int, str, BaseException]] = field(default_factory=list)


_current: _Deaths | None = None
"""Those of the innermost run."""


@contextmanager
def noticed(trace: Trace, connector: type) -> Iterator[None]:
    """Collect the threads that die, for `emit`. Their exceptions are printed as ever.

    The trace is not changed: a thread may die between any two lines of the engine's thread.
    `connector` is the class whose lines count as the place of an exception.
    """
    global _current
    outer, before = _current, threading.excepthook
    hook = before if outer is None else outer.hook
    mine = _current = _Deaths(trace, connector, hook)

    def note(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.thread is not None:
            mine.found.append((trace.step, args.thread.name, args.exc_value))
        hook(args)

    threading.excepthook = note
    try:
        yield
    finally:
        _current, threading.excepthook = outer, before


def emit() -> None:
    """Emit thread.died for the threads that have died since the last call, step by step."""
    if _current is None:
        return
    found, _current.found = _current.found, []
    for step, name, error in sorted(found, key=lambda death: death[:2]):
        event = thread_died(name, step, error, _current.connector)
        _current.trace.emit("thread.died", **event)
