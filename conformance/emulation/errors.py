# SPDX-License-Identifier: Apache-2.0
"""The errors that the emulation itself raises."""

from __future__ import annotations

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
