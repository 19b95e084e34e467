# SPDX-License-Identifier: Apache-2.0
"""Rows of slots out of a layer on a device, and into it, without making the host wait: by the kernels where they can run."""

from __future__ import annotations

import torch

from kvconform.kernels.paged import Paged
from kvconform.kernels.transfer import gather, scatter
from kvconform.refimpl.paging import blocks_first


class Moving:
    """One layer. ``slots`` [n] int64 is on its device; rows are ``[n, heads, values]``, contiguous (with an axis for K and V before
    ``values`` in releases that have one). ``kernels``: whether they do it, by default on a GPU; an emulated one has no kernels."""

    def __init__(self, layer: torch.Tensor, kernels: bool | None = None) -> None:
        self._view = blocks_first(layer)
        if kernels is None:  # asked of the tensor itself: what torch.Tensor says may be emulated
            kernels = bool(torch._C._dispatch_keys(layer).has(torch._C.DispatchKey.CUDA))
        self._paged = Paged([layer], "LBHNC") if kernels and layer.dim() == 4 else None

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of one slot's row."""
        return (self._view.shape[1], *self._view.shape[3:])

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of the rows."""
        if self._paged is not None:
            return gather(self._paged, slots).view(len(slots), *self.row)
        return self._view[slots // self._view.shape[2], :, slots % self._view.shape[2]].contiguous()

    def put(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the rows; changes the layer."""
        if self._paged is not None:
            scatter(
                self._paged,
                slots,
                rows.view(1, len(slots), self._paged.heads, self._paged.sides, self._paged.dim),
            )
        else:
            self._view[slots // self._view.shape[2], :, slots % self._view.shape[2]] = rows
