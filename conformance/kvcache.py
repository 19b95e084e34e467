# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache that a connector reads and writes, with a shadow copy that only the engine writes."""

from __future__ import annotations

import numpy as np
import torch

from kvconform.kernels.codes import CodeBook

LAYOUTS = {  # name -> shape of a layer's tensor, and the order of its axes as [block, head, slot, K or V, element]
    "packed": (lambda b, h, s, d: (b, h, s, 2 * d), None),
    "kv-second": (lambda b, h, s, d: (b, 2, s, h, d), (0, 3, 2, 1, 4)),
    "kv-first": (lambda b, h, s, d: (2, b, s, h, d), (1, 3, 2, 0, 4)),
}


class PagedCache:
    """Per layer one tensor, in `layout`: vLLM's since 0.26 is `packed`, [num_blocks, heads, block_size, 2 * head_dim].

    A *slot* is `block * block_size + offset`. Engine writes go to the tensor and to the shadow; whatever differs between the two was
    written by the connector.
    """

    def __init__(self, book: CodeBook, num_blocks: int, block_size: int, device: str = "cpu", layout: str = "packed") -> None:
        self.book, self.num_blocks, self.block_size = book, num_blocks, block_size
        shape_of, axes = LAYOUTS[layout]
        self.names = [f"model.layers.{i}.self_attn.attn" for i in range(book.layers)]
        # One allocation for all layers, as vLLM makes it: a layer's tensor is a view with an offset into shared storage.
        shape = shape_of(num_blocks, book.heads, block_size, book.head_dim)
        self.tensors = list(torch.zeros((book.layers, *shape), dtype=torch.float32, device=device))
        self._inside = (num_blocks, book.heads, block_size, 2, book.head_dim)
        self._views = [t.permute(axes) if axes else t.view(self._inside) for t in self.tensors]
        self.shadow = [v.clone() for v in self._views]
        self._mask = torch.from_numpy(book.content_mask())

    def split(self, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [n] to (block ids, offsets)."""
        index = torch.from_numpy(np.ascontiguousarray(slots, dtype=np.int64))
        return index // self.block_size, index % self.block_size

    def write(self, layer: int, slots: np.ndarray, rows: np.ndarray) -> None:
        """Engine write of rows [n, heads, width] to slots [n] of one layer."""
        blocks, offsets = self.split(slots)
        values = torch.from_numpy(rows).to(torch.float32).view(-1, self.book.heads, 2, self.book.head_dim)
        self._views[layer][blocks, :, offsets] = values
        self.shadow[layer][blocks, :, offsets] = values

    def read(self, layer: int, slots: np.ndarray) -> torch.Tensor:
        """Rows [n, heads, width] of slots [n] as they are now."""
        blocks, offsets = self.split(slots)
        return self._views[layer][blocks, :, offsets].flatten(2)

    def mismatches(self, layer: int, slots: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Indices into `slots` whose content differs from `rows` (the nonce lanes are not compared)."""
        have = self.read(layer, slots)
        different = ((have != torch.from_numpy(rows)) & self._mask).flatten(1).any(1)
        return different.nonzero().flatten().numpy()

    def foreign(self, layer: int) -> np.ndarray:
        """Slots [n] of one layer that somebody other than the engine changed since the last call; takes them into the shadow."""
        real, shadow = self._views[layer].view(torch.int32), self.shadow[layer].view(torch.int32)  # as bits: NaN must equal itself
        if torch.equal(real, shadow):
            return np.empty(0, dtype=np.int64)
        touched = (real != shadow).flatten(3).any(3).any(1)
        slots = touched.flatten().nonzero().flatten().numpy()
        blocks, offsets = self.split(slots)
        shadow[blocks, :, offsets] = real[blocks, :, offsets]
        return slots
