# SPDX-License-Identifier: Apache-2.0
"""Which lines of a connector a run executes.

A run that does not execute a changed line is the same as before: `kvconform watch` makes it last,
and the judgement of a mutant leaves it out.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol


class Files(Protocol):
    """The files whose lines are recorded, by the name that their code has."""

    def __contains__(self, file: str, /) -> bool: ...


Lines = dict[str, list[int]]
"""Executed lines, sorted, by file."""


def by_file(executed: Iterable[tuple[str, int]]) -> Lines:
    """Return what a Recorder has taken, by file."""
    found: Lines = {}
    for file, line in sorted(executed):
        found.setdefault(file, []).append(line)
    return found


class FilesBelow:
    """The files below some folders, for a Recorder."""

    def __init__(self, folders: Iterable[str]) -> None:
        self._folders = [Path(folder) for folder in folders]

    def __contains__(self, file: str) -> bool:
        """Return whether a file is below one of the folders."""
        path = Path(file)
        return any(path.is_relative_to(folder) for folder in self._folders)


class Recorder:
    """Records the executed lines of some files, in this thread and those started later.

    `executed`: (file, line), cleared by `taken`.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._known: dict[str, bool] = {}
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
        # Called for every call in the process: one look into a dictionary for most of them.
        file = frame.f_code.co_filename
        wanted = self._known.get(file)
        if wanted is None:
            wanted = self._known[file] = file in self._files
        if not wanted:
            return None
        self.executed.add((file, frame.f_lineno))
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, _: Any) -> Any:
        self.executed.add((frame.f_code.co_filename, frame.f_lineno))
        return self._on_line
