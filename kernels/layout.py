# SPDX-License-Identifier: Apache-2.0
"""Layouts: the axes of the tensors that an engine registers for its layers, and their memory order.

Axes have letters: L(ayer), B(lock), H(ead), N (slot in the block), S (side: K or V), D (element)
and C (content: K and V side by side, S before D on one axis).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import permutations

import torch

LOGICAL = "BHNSD"
"""The order of a layer's axes in the kernels."""


@dataclass(frozen=True)
class Layout:
    """A layout.

    `axes`: of a layer's tensor, as registered. `memory`: axes of the allocation for all layers,
    outermost first.
    """

    name: str
    axes: str
    memory: str

    @classmethod
    def named(cls, name: str) -> Layout:
        """Return a layout of `NAMES`, or a permutation of LBHNC (vLLM's names since 0.26).

        ValueError for another name.
        """
        if name in NAMES:
            return cls(name, *NAMES[name])
        if sorted(name) == sorted("LBHNC"):
            return cls(name, "BHNC", name)
        raise ValueError(
            f"no layout is called {name!r};"
            f" there are {', '.join(NAMES)} and the permutations of LBHNC"
        )

    @property
    def sides(self) -> int:
        """2 for K and V, 1 for a latent cache."""
        return 1 if "S" not in self.axes and "C" not in self.axes else 2

    def view(self, layer: torch.Tensor) -> torch.Tensor:
        """Return a layer's tensor as [blocks, heads, block size, sides, dim], over the same memory.

        The tensor's strides are arbitrary. ValueError if it does not have the axes of this layout.
        """
        if layer.dim() != len(self.axes):
            raise ValueError(
                f"a layer of layout {self.name} has the {len(self.axes)} axes {self.axes},"
                f" this one has {layer.dim()}"
            )
        axes = self.axes
        if "C" in axes:
            at = axes.index("C")
            if layer.shape[at] % 2:
                raise ValueError(
                    f"K and V share the last axis of layout {self.name},"
                    f" and {layer.shape[at]} elements cannot be halved"
                )
            layer = layer.unflatten(at, (2, -1))
            axes = axes.replace("C", "SD")
        if "S" in axes and layer.shape[axes.index("S")] != 2:
            at = axes.index("S")
            raise ValueError(
                f"axis {at} of layout {self.name} is K or V: 2 entries, not {layer.shape[at]}"
            )
        for letter in LOGICAL:
            if letter not in axes:
                layer = layer.unsqueeze(-1)
                axes += letter
        return layer.permute([axes.index(letter) for letter in LOGICAL])

    def allocate(
        self,
        layers: int,
        blocks: int,
        heads: int,
        block_size: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> list[torch.Tensor]:
        """Return the layers' tensors over one new, zeroed allocation in this layout's memory order.

        `dim`: elements of one head's K or V. ValueError for several heads in a layout without an
        axis for them.
        """
        lengths = {
            "L": layers,
            "B": blocks,
            "H": heads,
            "N": block_size,
            "S": self.sides,
            "D": dim,
            "C": 2 * dim,
        }
        if "H" not in self.axes and heads != 1:
            raise ValueError(f"layout {self.name} has one head, not {heads}")
        flat = torch.zeros(
            math.prod(lengths[axis] for axis in self.memory),
            dtype=torch.uint8 if dtype.itemsize == 1 else dtype,
            device=device,
        )
        whole = flat.view(dtype).view([lengths[axis] for axis in self.memory])
        return list(whole.permute([self.memory.index(axis) for axis in "L" + self.axes]))


NAMES: dict[str, tuple[str, str]] = {
    # (2, blocks, size, heads, dim): FlashAttention and most others, until 0.20
    "kv-first": ("SBNHD", "LSBNHD"),
    # the same with VLLM_KV_CACHE_LAYOUT=HND
    "kv-first-hnd": ("SBNHD", "LSBHND"),
    # (blocks, 2, size, heads, dim): FlashInfer and Triton attention; most others in 0.23
    "kv-second": ("BSNHD", "LBSNHD"),
    "kv-second-hnd": ("BSNHD", "LBSHND"),
    # (2, blocks, heads, size, dim): attention on the CPU, until 0.23
    "kv-first-heads": ("SBHND", "LSBHND"),
    # all layers of a block together: 0.12 to 0.26, with prefer_cross_layer_blocks
    "cross-layer": ("BSNHD", "BLSNHD"),
    "cross-layer-hnd": ("BSNHD", "BHLSND"),
    # (blocks, size, dim): one latent head, no V, until 0.26
    "mla": ("BND", "LBND"),
    # (blocks, 1, size, dim): the same since 0.29
    "mla-packed": ("BHND", "LBHND"),
    "mla-cross-layer": ("BND", "BLND"),
}
"""Named layouts: (axes of a layer's tensor, order in memory). Comments say who registers them."""

PACKED = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC")
"""Memory orders of (blocks, heads, size, 2 * dim) from which vLLM chooses since 0.26.

Other permutations work too.
"""


def every() -> tuple[str, ...]:
    """Return all names of layouts: those in `NAMES`, and the permutations of LBHNC that end in C.

    These 24 keep a head's content contiguous.
    """
    return (*NAMES, *("".join(order) + "C" for order in permutations("LBHN")))
