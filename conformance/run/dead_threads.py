# SPDX-License-Identifier: Apache-2.0
"""Threads that an exception has ended. Python prints the exception, and nobody waits for them."""

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
    """Deaths of one run, not emitted yet, as the fields of thread.died. `hook`: prints them."""

    trace: Trace
    hook: Callable[[threading.ExceptHookArgs], object]
    found: list[dict[str, Any]] = field(default_factory=list)


_current: _Deaths | None = None
"""Those of the innermost run."""


@contextmanager
def noticed(trace: Trace, connector: type) -> Iterator[None]:
    """Collect the threads of this run that die, for `emit`. Their exceptions are printed as ever.

    The trace is not changed: a thread may die between any two lines of the engine's thread. The
    exceptions are not kept, as they refer to what their frames had. `connector` is the class whose
    lines count as the place of an exception. Threads of earlier runs do not count.
    """
    global _current
    outer, before = _current, threading.excepthook
    hook = before if outer is None else outer.hook
    mine = _current = _Deaths(trace, hook)
    earlier = frozenset(threading.enumerate())

    def note(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.thread is not None and args.thread not in earlier:
            name = NUMBERED.sub(r"\1", args.thread.name)
            mine.found.append(thread_died(name, trace.step, args.exc_value, connector))
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
    for death in sorted(found, key=lambda death: (death["in_step"], death["thread"])):
        _current.trace.emit("thread.died", **death)
