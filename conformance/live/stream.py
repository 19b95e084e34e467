# SPDX-License-Identifier: Apache-2.0
"""A trace that is written to a file while it grows, so that it outlives its process."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from kvconform.trace import Event, Trace

REMEMBERED = 600
"""So many of the last events are looked at again: fields of an event may be filled in some steps later."""


class StreamTrace(Trace):
    """Appends events, and writes each as a line at once. A line with a `seq` that the file has already is the event as it came to be.

    Events of other threads than the one that made the trace are taken, too.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._lock = threading.RLock()
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._written: dict[int, str] = {}

    def emit(self, kind: str, /, **fields: Any) -> Event:
        with self._lock:
            event = super().emit(kind, **fields)
            self._write(event)
            return event

    def _write(self, event: Event) -> None:
        text = json.dumps(event, default=str)
        if self._written.get(event["seq"]) != text and not self._file.closed:
            self._written[event["seq"]] = text
            self._file.write(text + "\n")

    def amend(self) -> None:
        """Write again what has changed of the last events. Called once per step, and at the end."""
        with self._lock:
            for event in self.events[-REMEMBERED:]:
                self._write(event)
            for seq in [seq for seq in self._written if seq < len(self.events) - REMEMBERED]:
                del self._written[seq]
