# SPDX-License-Identifier: Apache-2.0
"""Which lines of a connector a run executes.

A run of the original that does not execute the changed line is the same with the mutant, so it need
not be repeated.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Recorder:
    """Records the executed lines of some files, in all threads of the process.

    `executed`: (file, line), cleared by `taken`.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._files = frozenset(files)
        self.executed: set[tuple[str, int]] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record in this context. It makes every call in the process slower."""
        before = sys.gettrace()
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(before)  # type: ignore[arg-type]

    def taken(self) -> set[tuple[str, int]]:
        """Return what was executed since the last call."""
        found, self.executed = self.executed, set()
        return found

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        self.executed.add((frame.f_code.co_filename, frame.f_lineno))
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, _: Any) -> Any:
        self.executed.add((frame.f_code.co_filename, frame.f_lineno))
        return self._on_line
