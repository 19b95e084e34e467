# SPDX-License-Identifier: Apache-2.0
"""Did a transfer read device memory before the compute stream had written it? Only the bytes can tell, and only the adversary that lets
transfers overtake makes it happen: what was read is watched while the compute stream does what had been queued before the transfer was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Watch:
    """One read that happened too early if what it reads changes before the compute queue has done `due` entries. `read` gives the tensors
    read (or made of what was read), `tell` is called once if they changed."""

    def __init__(self, due: int, read: Callable[[], list[Any]], tell: Callable[[], None]) -> None:
        self.due, self.read, self.tell = due, read, tell
        self._before: list[torch.Tensor] = []

    def look(self) -> None:
        """Before the compute queue does something: remember what is there. Changes no bytes but its own."""
        self._before = self._bytes()

    def changed(self) -> bool:
        """Afterwards: whether it is something else now; tells so."""
        now = self._bytes()
        same = len(now) == len(self._before) and all(
            torch.equal(a, b) for a, b in zip(now, self._before, strict=True)
        )
        if not same:
            self.tell()
        return not same

    def _bytes(self) -> list[torch.Tensor]:
        with torch.inference_mode():
            try:
                found = self.read()
            except (
                RuntimeError,
                IndexError,
            ):  # an operator that cannot do now what it did: its operands are others
                return []
            return [tensor.contiguous().reshape(-1).view(torch.uint8).clone() for tensor in found]
