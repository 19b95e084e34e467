# SPDX-License-Identifier: Apache-2.0
"""Connectors with few staging buffers on the device.

A buffer is used again when the copy from it is done. The stream that fills it waits for that, and
the host never does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvconform.refimpl.plan import Load, Piece, Save
from kvconform.refimpl.streamed import Storing, StreamedConnector, Transfer
from kvconform.refimpl.variants.prefetched import Prefetched

if TYPE_CHECKING:
    from torch import Tensor

BUFFERS = 2


class Staged(StreamedConnector):
    """Saves through staging buffers.

    The compute stream gathers into one, and then owns what the copies read.
    """

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


class DoubleBuffered(Prefetched, Staged):
    """Loads what was prefetched through two buffers: one is filled while the other is placed.

    The load stream fills a buffer from the host, and another stream copies from it into the blocks.
    """

    _place_stream: torch.cuda.Stream

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._place_stream = torch.cuda.Stream()
        sizes = [self._bytes_of(name) for name in self._layers]
        device = next(iter(self._layers.values())).device
        # The next one to be filled comes first; each with the event of the copy from it.
        self._buffers: list[tuple[Tensor, torch.cuda.Event | None]] = [
            (torch.empty(max(sizes), dtype=torch.uint8, device=device), None)
            for _ in range(BUFFERS)
        ]

    def _bytes_of(self, name: str) -> int:
        """Return the size of a layer of a whole chunk."""
        row = math.prod(self._moving[name].row) * self._layers[name].dtype.itemsize
        return row * self.options.chunk_tokens

    @property
    def _last_stream(self) -> torch.cuda.Stream:
        return self._place_stream

    def _fetch(self, load: Load) -> Transfer:
        transfer = super()._fetch(load)
        self._memory.release(load.req)
        return transfer

    def _copy_in(self, transfer: Transfer, piece: Piece, name: str, host: Tensor) -> None:
        transfer.hosts[piece.key, name] = host
        buffer, placed = self._buffers.pop(0)
        self._await(placed)
        rows = buffer[: host.numel() * host.element_size()].view(host.dtype).view(host.shape)
        rows.copy_(host, non_blocking=True)
        self._place_stream.wait_stream(self._load_stream)
        with torch.cuda.stream(self._place_stream):
            slots = self._slots(transfer, piece, rows.device)
            self._moving[name].put(slots, rows)
            is_placed = torch.cuda.Event()
            is_placed.record()
        self._buffers.append((buffer, is_placed))

    def _await(self, placed: torch.cuda.Event | None) -> None:
        """Let the load stream wait until a buffer is free."""
        if placed is not None:
            self._load_stream.wait_event(placed)

    def shutdown(self) -> None:
        if self._layers:
            self._place_stream.synchronize()
        super().shutdown()
