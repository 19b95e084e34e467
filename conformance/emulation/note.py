# SPDX-License-Identifier: Apache-2.0
"""What the emulation reports: its errors, and notes of host synchronisations and hazards."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar


class NotEmulated(RuntimeError):
    """The connector used a part of CUDA that is not emulated: `what`. Not a connector fault."""

    raised: ClassVar[list[str]] = []
    """All messages of this process: a connector that catches the error is still not judged."""

    def __init__(self, what: str) -> None:
        super().__init__(f"The CUDA emulation has no {what}.")
        self.what = what
        self.raised.append(str(self))


class DeviceFault(RuntimeError):
    """Queued work failed when its turn came, as a kernel with an index out of range does.

    Raised where the work is waited for or run.
    """


OWN = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Note:
    """One observation.

    The kinds are:

    - "sync": the host waited for a stream.
    - "freed_device", "freed_pinned": memory was reused while queued work still used it.
    - "read_early": a transfer read device memory that the compute stream wrote afterwards, although
      the write had been queued before.
    - "undelayed": an operation that cannot be queued ran at once, after everything before it.
    """

    kind: str
    what: str
    """The call or operation."""
    stream: str
    """Name of the stream concerned; "" for the whole device, and for pinned memory."""
    thread: str
    """Name of the thread."""
    where: str
    """File, line and function of the code that called torch."""


BETWEEN = ("contextlib.py", "threading.py", "kv/slowed.py")
"""Files whose code stands between torch and its caller."""


@cache
def shown(file: str) -> str:
    """Return the last two parts of a file's path.

    They do not depend on the machine or the working directory.
    """
    return "/".join(Path(file).absolute().parts[-2:]) if not file.startswith("<") else file


def caller() -> str:
    """Return "file:line in function" of the innermost frame outside torch and the emulation.

    Returns "" if there is no such frame.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(OWN) and "/torch/" not in file and not file.endswith(BETWEEN):
            return f"{shown(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
