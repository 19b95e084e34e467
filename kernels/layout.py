# SPDX-License-Identifier: Apache-2.0
"""Layouts: how the tensors that an engine registers for its layers index blocks, heads, slots, K or V, and elements.

Axes have letters: L(ayer), B(lock), H(ead), N (slot in the block), S (side: K or V), D (element), and C (content: K and V side by side,
S before D on one axis). A layout names the axes of a layer's tensor, and the order that they and L have in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import permutations

import torch

LOGICAL = "BHNSD"
"""The order in which the kernels see a layer."""


@dataclass(frozen=True)
class Layout:
    """`axes`: of a layer's tensor, as registered. `memory`: of all layers, outermost first; what the allocation is made of."""

    name: str
    axes: str
    memory: str

    @classmethod
    def named(cls, name: str) -> Layout:
        """The layout of `NAMES`, or a permutation of LBHNC (vLLM's own names since 0.29). ValueError for another name."""
        if name in NAMES:
            return cls(name, *NAMES[name])
        if sorted(name) == sorted("LBHNC"):
            return cls(name, "BHNC", name)
        raise ValueError(
            f"no layout is called {name!r}; there are {', '.join(NAMES)} and the permutations of LBHNC"
        )

    @property
    def sides(self) -> int:
        """2 where there are K and V, 1 for a latent cache."""
        return 1 if "S" not in self.axes and "C" not in self.axes else 2

    def view(self, layer: torch.Tensor) -> torch.Tensor:
        """A layer's tensor as [blocks, heads, block size, sides, dim], over the same memory; its strides may be anything.

        ValueError when the tensor has not the axes of this layout.
        """
        if layer.dim() != len(self.axes):
            raise ValueError(
                f"a layer of layout {self.name} has the {len(self.axes)} axes {self.axes}, this one has {layer.dim()}"
            )
        axes = self.axes
        if "C" in axes:
            at = axes.index("C")
            if layer.shape[at] % 2:
                raise ValueError(
                    f"K and V share the last axis of layout {self.name}, and {layer.shape[at]} elements cannot be halved"
                )
            layer, axes = layer.unflatten(at, (2, -1)), axes.replace("C", "SD")
        if "S" in axes and layer.shape[axes.index("S")] != 2:
            raise ValueError(
                f"axis {axes.index('S')} of layout {self.name} is K or V: 2 entries, not {layer.shape[axes.index('S')]}"
            )
        for letter in LOGICAL:
            if letter not in axes:
                layer, axes = layer.unsqueeze(-1), axes + letter
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
        """The layers' tensors, zeros, over one new allocation in this layout's memory order; shapes as `axes` says.

        `dim`: elements of one head's K or V. ValueError for several heads in a layout that has no axis for them.
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
    # name: (axes of a layer's tensor, order in memory)                   who registers it
    "kv-first": (
        "SBNHD",
        "LSBNHD",
    ),  # (2, blocks, size, heads, dim)     FlashAttention and most others, until 0.20
    "kv-first-hnd": ("SBNHD", "LSBHND"),  # the same with VLLM_KV_CACHE_LAYOUT=HND
    "kv-second": (
        "BSNHD",
        "LBSNHD",
    ),  # (blocks, 2, size, heads, dim)    FlashInfer and Triton attention; most others in 0.23
    "kv-second-hnd": ("BSNHD", "LBSHND"),
    "kv-first-heads": (
        "SBHND",
        "LSBHND",
    ),  # (2, blocks, heads, size, dim)   attention on the CPU, until 0.23
    "cross-layer": (
        "BSNHD",
        "BLSNHD",
    ),  # all layers of a block together: 0.12 to 0.26, where prefer_cross_layer_blocks is set
    "cross-layer-hnd": ("BSNHD", "BHLSND"),
    "mla": ("BND", "LBND"),  # (blocks, size, dim): one latent head, no V, until 0.26
    "mla-packed": ("BHND", "LBHND"),  # (blocks, 1, size, dim): the same since 0.29
    "mla-cross-layer": ("BND", "BLND"),
}

PACKED = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC")
"""(blocks, heads, size, 2 * dim): the orders in memory that vLLM chooses from since 0.29; any other permutation works too."""


def every() -> tuple[str, ...]:
    """Names of all layouts: those of `NAMES` and the 24 permutations of LBHNC that keep a head's content contiguous."""
    return (*NAMES, *("".join(order) + "C" for order in permutations("LBHN")))
