# SPDX-License-Identifier: Apache-2.0
"""Detection of transfers that read device memory before the compute stream wrote it.

Only the bytes show such a read, and it happens only under the adversary that lets transfers
overtake. What was read is therefore watched while the compute stream does the work that had been
queued before the transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Watch:
    """One read; it was too early if what it read changes before `due` compute entries are done.

    `read` returns the tensors that were read, or results computed from them. `report` is called
    once if they changed.
    """

    def __init__(self, due: int, read: Callable[[], list[Any]], report: Callable[[], None]) -> None:
        self.due = due
        self.read = read
        self.report = report
        self._before: list[torch.Tensor] = []

    def look(self) -> None:
        """Remember the bytes before the compute queue does an entry."""
        self._before = self._bytes()

    def changed(self) -> bool:
        """Return whether the bytes differ after the entry; report it if they do."""
        now = self._bytes()
        same = len(now) == len(self._before) and all(
            torch.equal(a, b) for a, b in zip(now, self._before, strict=True)
        )
        if not same:
            self.report()
        return not same

    def _bytes(self) -> list[torch.Tensor]:
        with torch.inference_mode():
            try:
                found = self.read()
            except (RuntimeError, IndexError):
                # An operator that worked before fails now: its operands have changed.
                return []
            return [tensor.contiguous().reshape(-1).view(torch.uint8).clone() for tensor in found]
