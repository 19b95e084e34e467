# SPDX-License-Identifier: Apache-2.0
"""Views of tensors with wider elements, for what only copies or compares bits."""

from __future__ import annotations

import torch

WIDE = (torch.complex128, torch.int64, torch.int32, torch.int16)
"""The dtypes as which bytes are copied, widest first; torch copies indexed elements one by one."""


def wider(*tensors: torch.Tensor, most: int = 16) -> tuple[torch.Tensor, ...]:
    """Return views of the tensors whose last axis has fewer, wider elements.

    The elements are as wide as all tensors permit, at most `most` bytes. Nothing is copied.
    """
    for dtype in WIDE:
        if dtype.itemsize <= most and all(_permits(tensor, dtype.itemsize) for tensor in tensors):
            return tuple(tensor.view(dtype) for tensor in tensors)
    return tensors


def _permits(tensor: torch.Tensor, width: int) -> bool:
    if tensor.stride(-1) != 1 or width < tensor.element_size():
        return False
    size = tensor.element_size()
    places = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return (
        all(place * size % width == 0 for place in places)
        and tensor.untyped_storage().data_ptr() % width == 0
    )
