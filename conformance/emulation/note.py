# SPDX-License-Identifier: Apache-2.0
"""What the emulation saw and tells: host synchronisations and hazards."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

OWN = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Note:
    """One observation. `kind` is "sync" (the host waited for a stream), "freed_device" or "freed_pinned" (memory was handed out again
    while queued work still used it), "read_early" (a transfer read device memory that the compute stream wrote afterwards, though its
    writing had been queued before), or "undelayed" (an operation that could not be queued was run at once, after everything before it).
    `what` says which call or operation, `stream` the stream concerned, `thread` the thread's name, `where` file, line and function of the
    code that called torch."""

    kind: str
    what: str
    stream: str
    thread: str
    where: str


@cache
def shown(file: str) -> str:
    """The last two parts of a file's path: the same on every machine, and in every working directory."""
    return "/".join(Path(file).absolute().parts[-2:]) if not file.startswith("<") else file


def caller() -> str:
    """ "file:line in function" of the innermost frame outside of torch and of the emulation, "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if (
            not file.startswith(OWN)
            and "/torch/" not in file
            and not file.endswith(("contextlib.py", "threading.py"))
        ):
            return f"{shown(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
