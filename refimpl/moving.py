# SPDX-License-Identifier: Apache-2.0
"""Copies of slots out of and into a layer on a device, without blocking the host.

The project's kernels do them where they can run, otherwise PyTorch's indexing.
"""

from __future__ import annotations

import torch

from kvconform.kernels.paged import Paged
from kvconform.kernels.transfer import gather, scatter
from kvconform.refimpl.paging import blocks_first


class Moving:
    """The slots of one layer.

    Slots are an int64 tensor `[n]` on the layer's device; rows are contiguous `[n, heads, values]`,
    with an axis for K and V before `values` in vLLM releases that have one. `kernels`: whether the
    kernels are used; by default, if the layer is on a GPU. An emulated GPU has no kernels.
    """

    def __init__(self, layer: torch.Tensor, kernels: bool | None = None) -> None:
        self._view = blocks_first(layer)
        if kernels is None:
            # From the tensor's dispatch key: the attributes of torch.Tensor may be emulated.
            kernels = bool(torch._C._dispatch_keys(layer).has(torch._C.DispatchKey.CUDA))
        self._paged = Paged([layer], "LBHNC") if kernels and layer.dim() == 4 else None

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of one slot's row."""
        return (self._view.shape[1], *self._view.shape[3:])

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """Return a copy of the slots' rows."""
        if self._paged is not None:
            return gather(self._paged, slots).view(len(slots), *self.row)
        block_size = self._view.shape[2]
        return self._view[slots // block_size, :, slots % block_size].contiguous()

    def put(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the rows into the slots of the layer."""
        paged = self._paged
        if paged is not None:
            shaped = rows.view(1, len(slots), paged.heads, paged.sides, paged.dim)
            scatter(paged, slots, shaped)
        else:
            block_size = self._view.shape[2]
            self._view[slots // block_size, :, slots % block_size] = rows
