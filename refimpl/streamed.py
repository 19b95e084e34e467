# SPDX-License-Identifier: Apache-2.0
"""The reference connector on CUDA: it copies on its own streams, through pinned memory.

The engine computes meanwhile. Four waits make this correct:

1. A save waits for the forward pass that writes what it reads.
2. A load waits for the steps that still use the blocks which it fills.
3. A layer's attention waits for the layer's load.
4. The forward pass of a block's new owner waits for the saves that still read the block.

The host waits only in `shutdown`. `refimpl/defects/streams.py` has connectors that lack one of the
waits, except the second: it matters to engines that reuse blocks of steps in flight (until 0.26).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.moving import Moving
from kvconform.refimpl.plan import Load, Piece, ReferenceMetadata, Save

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Transfer:
    """Copies under way.

    `done` is reached when all are done. `hosts`, the host's buffers by chunk and layer, must live
    until then.
    """

    # Looked up at each call: the emulation of CUDA replaces torch.cuda.Event.
    done: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event())
    hosts: dict[tuple[str, str], Tensor] = field(default_factory=dict)


@dataclass
class Storing(Transfer):
    """Copies of a save from the device.

    `save` is None for copies that do not complete their chunks, and for a save that was abandoned.
    """

    epoch: int = 0
    save: Save | None = None


class StreamedConnector(ReferenceConnector):
    """The reference connector with asynchronous copies on CUDA streams.

    It has the same options, but ignores `load_delay` and `save_delay`: copies take their own time.
    """

    _load_stream: torch.cuda.Stream
    _store_stream: torch.cuda.Stream

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {**super().kvconform_capabilities(extra_config), "context_parallel": False}

    # -- Worker half

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._load_stream = torch.cuda.Stream()
        self._store_stream = torch.cuda.Stream()
        self._moving = {name: Moving(layer) for name, layer in self._layers.items()}
        # Events of the loads that a layer's attention has to wait for.
        self._arrivals: dict[str, list[torch.cuda.Event]] = {}
        self._loads: list[tuple[Load, Transfer]] = []
        self._stores: list[Storing] = []

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Queue the step behind the saves under way, and abandon those of dropped requests.

        From now on, blocks may have a new owner.
        """
        super().handle_preemptions(kv_connector_metadata)
        self._fence()
        if isinstance(kv_connector_metadata, ReferenceMetadata):
            for storing in self._stores:
                save = storing.save
                if save is None or save.final:
                    continue
                if save.req in kv_connector_metadata.dropped:
                    storing.save = None

    def _fence(self) -> None:
        """Let the compute stream wait for all saves that are queued."""
        torch.cuda.current_stream().wait_stream(self._store_stream)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._metadata().loads:
            self._loads.append((load, self._fetch(load)))
        if forward_context.attn_metadata is None:
            self.wait_for_save()

    def _fetch(self, load: Load) -> Transfer:
        """Queue the copies of a load, layer by layer."""
        transfer = Transfer()
        self._wait_for_users()
        with torch.cuda.stream(self._load_stream):
            for name in self._layers:
                for piece in load.pieces:
                    self._fill(transfer, piece, name)
                if not load.is_async:
                    arrived = torch.cuda.Event()
                    arrived.record(self._last_stream)
                    self._arrivals.setdefault(name, []).append(arrived)
            transfer.done.record(self._last_stream)
        return transfer

    @property
    def _last_stream(self) -> torch.cuda.Stream:
        """The stream of the copies that fill the blocks."""
        return self._load_stream

    def _wait_for_users(self) -> None:
        """Let loads wait for the steps that are queued: they may use the blocks."""
        self._load_stream.wait_stream(torch.cuda.current_stream())

    def _fill(self, transfer: Transfer, piece: Piece, name: str) -> None:
        """Queue the copy of a piece into one layer, or note its blocks as failed."""
        dtype = self._layers[name].dtype
        row = self._moving[name].row
        width = math.prod(row) * dtype.itemsize
        rows = len(piece.slots)
        data = self._get(piece.key, name)
        wanted = b""
        if data is not None:
            wanted = data[piece.first * width : (piece.first + rows) * width]
        if len(wanted) < rows * width:
            self._store.drop(piece.key)
            self._invalid |= piece.blocks(self._block_size)
            self._bad |= piece.blocks(self._block_size)
            return
        raw = torch.frombuffer(bytearray(wanted), dtype=torch.uint8)
        host = raw.view(dtype).view(rows, *row)
        self._copy_in(transfer, piece, name, host.pin_memory())

    def _copy_in(self, transfer: Transfer, piece: Piece, name: str, host: Tensor) -> None:
        transfer.hosts[piece.key, name] = host
        device = self._layers[name].device
        self._moving[name].put(self._slots(transfer, piece, device), self._upload(host, device))

    def _upload(self, host: Tensor, device: torch.device) -> Tensor:
        return host.to(device, non_blocking=True)

    def _slots(self, transfer: Transfer, piece: Piece, device: torch.device) -> Tensor:
        """Return a piece's slots on the device; the host's copy lives as long as the transfer.

        The slots also fit a tensor whose blocks are smaller than the scheduler's: several of its
        consecutive blocks make one.
        """
        index = torch.tensor(piece.slots).pin_memory()
        transfer.hosts[piece.key, f"slots {len(transfer.hosts)}"] = index
        return index.to(device, non_blocking=True)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for arrived in self._arrivals.pop(layer_name, ()):
            torch.cuda.current_stream().wait_event(arrived)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        metadata = self._metadata()
        if self.options.layerwise and metadata.saves:
            self._hooked.add(layer_name)
            self._copy_out(metadata.epoch, metadata.saves, [layer_name])

    def wait_for_save(self) -> None:
        metadata = self._metadata()
        if metadata is not self._saved:
            layers = [name for name in self._layers if name not in self._hooked]
            self._copy_out(metadata.epoch, metadata.saves, layers, last=True)
        self._hooked.clear()
        self._saved = metadata

    def _copy_out(
        self, epoch: int, saves: Sequence[Save], layers: Sequence[str], *, last: bool = False
    ) -> None:
        """Queue the copies of these layers behind the work queued on the compute stream.

        `last`: these copies complete the chunks.
        """
        self._wait_for_compute()
        for save in saves:
            storing = Storing(epoch=epoch, save=save if last else None)
            with torch.cuda.stream(self._store_stream):
                for name in layers if self._is_sound(save) else ():
                    for piece in save.pieces:
                        slots = self._slots(storing, piece, self._layers[name].device)
                        self._download(storing, piece, name, self._moving[name].take(slots))
                storing.done.record()
            self._stores.append(storing)

    def _wait_for_compute(self) -> None:
        """Let saves wait for the forward pass that is queued."""
        self._store_stream.wait_stream(torch.cuda.current_stream())

    def _download(self, storing: Storing, piece: Piece, name: str, rows: Tensor) -> None:
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        storing.hosts[piece.key, name] = host
        host.copy_(rows, non_blocking=True)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report the transfers that are done. Only polls them: the step is not delayed."""
        while self._stores and self._has_ended(self._stores[0]):
            self._commit(self._stores.pop(0))
        loaded = [load for load, transfer in self._loads if self._has_ended(transfer)]
        self._loads = [(load, transfer) for load, transfer in self._loads if load not in loaded]
        sent, self._sent = self._sent, set()
        return sent or None, {load.req for load in loaded if load.is_async} or None

    def _has_ended(self, transfer: Transfer) -> bool:
        return transfer.done.query()

    def _commit(self, storing: Storing) -> None:
        """Store what was copied, and commit the chunks if these copies complete them.

        Called in the order of the copies: the layers that hooks copied come before the others.
        """
        for (key, name), host in storing.hosts.items():
            is_layer = name in self._layers  # else it is a tensor of slots
            if is_layer:
                data = host.contiguous().view(torch.uint8).numpy().tobytes()
                self._put(storing.epoch, key, name, data, len(host))
        if storing.save is None:
            return
        for piece in storing.save.pieces if self._is_sound(storing.save) else ():
            self._store.commit(storing.epoch, piece.key)
        if storing.save.final:
            self._sent.add(storing.save.req)

    def shutdown(self) -> None:
        """Abandon all transfers, after their copies are done: the memory is about to be freed."""
        if self._layers:
            self._load_stream.synchronize()
            self._store_stream.synchronize()
            self._stores = []
            self._loads = []
            self._arrivals = {}
        super().shutdown()
