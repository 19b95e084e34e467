# SPDX-License-Identifier: Apache-2.0
"""What the emulation raises of its own."""

from __future__ import annotations

from typing import ClassVar


class NotEmulated(RuntimeError):
    """The connector used a part of CUDA that has no counterpart here; `what` names it. Not a fault of the connector."""

    raised: ClassVar[list[str]] = []
    """The sentence of each one ever made in this process: whoever catches one and goes on is still not judged."""

    def __init__(self, what: str) -> None:
        super().__init__(f"The CUDA emulation has no {what}.")
        self.what = what
        self.raised.append(str(self))


class DeviceFault(RuntimeError):
    """Work failed when its turn on a stream came, as a kernel does that is given a wild index: raised where the work was waited for or
    run."""
