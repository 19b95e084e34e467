# SPDX-License-Identifier: Apache-2.0
"""A connector that saves through few staging buffers on the device.

The compute stream gathers into a buffer, and another stream copies from it. A buffer is used again
when its copy is done, so the compute stream waits whenever all are in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvconform.refimpl.plan import Piece, Save
from kvconform.refimpl.streamed import Storing, StreamedConnector

if TYPE_CHECKING:
    from torch import Tensor

BUFFERS = 2


class Staged(StreamedConnector):
    """Gathers on the compute stream, which then owns what the copies read."""

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        # Buffers in flight, oldest first, each with the event of the copy that reads it.
        self._in_flight: list[tuple[Tensor, torch.cuda.Event]] = []

    def _copy_out(
        self, epoch: int, saves: Sequence[Save], layers: Sequence[str], *, last: bool = False
    ) -> None:
        for save in saves:
            storing = Storing(epoch=epoch, save=save if last else None)
            for name in layers if self._is_sound(save) else ():
                for piece in save.pieces:
                    self._stage(storing, piece, name)
            with torch.cuda.stream(self._store_stream):
                storing.done.record()
            self._stores.append(storing)

    def _stage(self, storing: Storing, piece: Piece, name: str) -> None:
        """Wait for a free buffer, fill it, and queue the copy from it."""
        if len(self._in_flight) == BUFFERS:
            _, free = self._in_flight.pop(0)
            torch.cuda.current_stream().wait_event(free)
        slots = self._slots(storing, piece, self._layers[name].device)
        buffer = self._moving[name].take(slots)
        self._wait_for_compute()
        with torch.cuda.stream(self._store_stream):
            self._download(storing, piece, name, buffer)
            copied = torch.cuda.Event()
            copied.record()
        self._in_flight.append((buffer, copied))
