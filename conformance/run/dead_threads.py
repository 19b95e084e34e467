# SPDX-License-Identifier: Apache-2.0
"""Threads that an exception has ended. Python prints the exception, and the engine never hears."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvconform.contract.events import thread_died
from kvconform.contract.trace import Trace

NUMBERED = re.compile(r"^(Thread|ThreadPoolExecutor)-\d+")
"""Names by Python, with a number that depends on what the process did before."""


@dataclass
class _Deaths:
    """Deaths of one run, not emitted yet, as the fields of thread.died.

    `connector` is the class whose lines count as the place of an exception. `excused` are threads
    of earlier runs, and those of a connector that was shut down. `outer` is the run around this
    one, such as the one that needs a calibration.
    """

    trace: Trace
    connector: type
    outer: _Deaths | None
    prints: Callable[[threading.ExceptHookArgs], object]
    """What was in force before all runs."""
    excused: set[threading.Thread] = field(default_factory=lambda: set(threading.enumerate()))
    found: list[dict[str, Any]] = field(default_factory=list)

    def note(self, thread: threading.Thread, error: BaseException) -> None:
        """Note a death, or pass it on to the run around this one if the thread is excused."""
        if thread not in self.excused:
            name = NUMBERED.sub(r"\1", thread.name)
            self.found.append(thread_died(name, self.trace.step, error, self.connector))
        elif self.outer is not None:
            self.outer.note(thread, error)


_current: _Deaths | None = None
"""Those of the innermost run."""


@contextmanager
def noticed(trace: Trace, connector: type) -> Iterator[None]:
    """Collect the threads of this run that die, for `emit`. Their exceptions are printed as ever.

    The trace is not changed: a thread may die between any two lines of the engine's thread. The
    exceptions are not kept, as they refer to what their frames had. A thread that ends by
    SystemExit does so on purpose. Deaths are not seen if the connector replaces
    `threading.excepthook`.
    """
    global _current
    before = threading.excepthook
    prints = before if _current is None else _current.prints
    mine = _current = _Deaths(trace, connector, _current, prints)

    def note(args: threading.ExceptHookArgs) -> None:
        if args.thread is not None and isinstance(args.exc_value, Exception):
            mine.note(args.thread, args.exc_value)
        prints(args)

    threading.excepthook = note
    try:
        yield
    finally:
        _current = mine.outer
        if threading.excepthook is note:
            threading.excepthook = before


def emit() -> None:
    """Emit thread.died for the threads that have died since the last call, step by step."""
    if _current is None:
        return
    found, _current.found = _current.found, []
    for death in sorted(found, key=lambda e: (e["in_step"], e["thread"], e["error"])):
        _current.trace.emit("thread.died", **death)


def excuse() -> None:
    """Excuse the threads that are alive: their connector is being shut down, and they may end."""
    if _current is not None:
        _current.excused.update(threading.enumerate())
