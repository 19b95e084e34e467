# SPDX-License-Identifier: Apache-2.0
"""Planted defects: connectors with streams of their own that omit a wait or free memory early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvconform.refimpl.plan import Piece
from kvconform.refimpl.streamed import Storing, StreamedConnector, Transfer
from kvconform.refimpl.variants.staged import DoubleBuffered

if TYPE_CHECKING:
    from torch import Tensor


class SavesTooEarly(StreamedConnector):
    """Copies blocks before the compute stream has written them."""

    def _wait_for_compute(self) -> None:
        return


class NobodyWaits(StreamedConnector):
    """Lets attention start before its KV has arrived."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        return


class Unfenced(StreamedConnector):
    """Lets blocks be overwritten that its copies still read."""

    def _fence(self) -> None:
        return


class SubmittedIsDone(StreamedConnector):
    """Reports a load as finished once its copies are queued."""

    def _has_ended(self, transfer: Transfer) -> bool:
        return not isinstance(transfer, Storing) or super()._has_ended(transfer)


class PublishesTooEarly(StreamedConnector):
    """Reads its host buffers without asking whether the copies have arrived."""

    def _has_ended(self, transfer: Transfer) -> bool:
        return isinstance(transfer, Storing) or super()._has_ended(transfer)


class WaitsInTheHook(StreamedConnector):
    """Waits on the host for every layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        torch.cuda.current_stream().synchronize()


class WaitsAtTheStart(StreamedConnector):
    """Waits on the host for the loads, before the forward pass is queued."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self._metadata().loads:
            self._load_stream.synchronize()


class WaitsForAllLayers(StreamedConnector):
    """Lets the first layer wait for the loads of all layers."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        for name in list(self._arrivals):
            super().wait_for_layer_load(name)


class JoinsStreams(StreamedConnector):
    """Lets every layer wait for the copies of the layer before it."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        self._fence()


class ForgetsStream(StreamedConnector):
    """Allocates staging memory on the compute stream, uses it on another one, and frees it."""

    def _wait_for_users(self) -> None:
        super()._wait_for_users()
        self._compute = torch.cuda.current_stream()

    def _upload(self, host: Tensor, device: torch.device) -> Tensor:
        with torch.cuda.stream(self._compute):
            staging = torch.empty(host.shape, dtype=host.dtype, device=device)
        return staging.copy_(host, non_blocking=True)


class LetsGoOfHost(StreamedConnector):
    """Copies by address from a pinned buffer that is freed when the call returns."""

    def _copy_in(self, transfer: Transfer, piece: Piece, name: str, host: Tensor) -> None:
        """Copy every head of every slot, which are contiguous runs."""
        from vllm import _custom_ops as ops

        rows = self._layers[name]
        size, heads = rows.shape[2], rows.shape[1]
        pairs = [
            (host[number, head].data_ptr(), rows[slot // size, head, slot % size].data_ptr())
            for number, slot in enumerate(piece.slots)
            for head in range(heads)
        ]
        width = host[0, 0].numel() * host.element_size()
        source, target = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
        ops.swap_blocks_batch(source, target, torch.full((len(pairs),), width, dtype=torch.int64))


class RefillsTooEarly(DoubleBuffered):
    """Fills a device buffer again that is still being copied from."""

    def _await(self, placed: torch.cuda.Event | None) -> None:
        return


class WaitsForBuffers(DoubleBuffered):
    """Waits on the host until a device buffer is free."""

    def _await(self, placed: torch.cuda.Event | None) -> None:
        if placed is not None:
            placed.synchronize()
