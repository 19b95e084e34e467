# SPDX-License-Identifier: Apache-2.0
"""Caches drawn by Hypothesis in memory full of noise, and their expected contents.

`codes.CodeBook` (numpy) gives the contents. The expectation knows a layout only by the addresses of
its elements: an address map of the numbers 0, 1, 2, ..., made as the cache is. Whole buffers are
compared, gaps included, so a write to a wrong place is always seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kvconform.kernels.codes import CodeBook
from kvconform.kernels.device import AVAILABLE, INTERPRETED
from kvconform.kernels.layout import Layout, every
from kvconform.kernels.paged import BITS, Paged

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.uint8)
CUDA = torch.cuda.is_available()
EXAMPLES = settings(
    # On a GPU, most examples compile a kernel of their own.
    max_examples=30 if INTERPRETED or CUDA else 100,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)


FEW = settings(EXAMPLES, max_examples=12)
"""For what takes long by its nature."""


def _backend(name: str, device: str, backend: str, lacking: str | None) -> Any:
    marks = [pytest.mark.skip(reason=lacking)] if lacking else []
    return pytest.param((device, backend), id=name, marks=marks)


no_triton = None if AVAILABLE else "Triton is not installed"
no_cuda = (
    "no CUDA device"
    if not CUDA
    else "TRITON_INTERPRET=1 is set, so nothing is compiled"
    if INTERPRETED
    else None
)
BACKENDS = pytest.mark.parametrize(
    "where",
    [
        _backend("torch", "cpu", "torch", None),
        _backend(
            "interpreter",
            "cpu",
            "triton",
            no_triton or (None if INTERPRETED else "TRITON_INTERPRET=1 is not set"),
        ),
        _backend("cuda-torch", "cuda", "torch", no_cuda),
        _backend("cuda", "cuda", "triton", no_triton or no_cuda),
    ],
)
"""`where`: (device, backend) of every implementation.

Those that cannot run here are skipped, with the reason.
"""


@dataclass
class Drawn:
    """A cache on a device.

    It has buffers (integers), and per layer an address map [blocks, heads, size, sides, dim] into
    one of them.
    """

    layout: Layout
    dtype: torch.dtype
    buffers: list[torch.Tensor]
    of_layer: list[int]
    maps: list[np.ndarray]
    paged: Paged

    def memory(self) -> list[np.ndarray]:
        """All buffers now, as copies on the host."""
        return [buffer.cpu().numpy().copy() for buffer in self.buffers]

    def codes(self, content: list[int], nonce: int) -> np.ndarray:
        """Bits [n, layers, heads, sides, dim] that content ids must have."""
        paged = self.paged
        rows = CodeBook(max(paged.numbers) + 1, paged.heads, paged.dim).rows(
            np.array(content, dtype=np.uint64), nonce
        )
        rows = rows.reshape(len(content), max(paged.numbers) + 1, paged.heads, 2, paged.dim)[
            :, list(paged.numbers), :, : paged.sides
        ]
        return (
            torch.from_numpy(np.ascontiguousarray(rows))
            .to(torch.float32)
            .to(self.dtype)
            .view(BITS[self.dtype.itemsize])
            .numpy()
        )

    def at(self, layer: int, slot: int) -> np.ndarray:
        """Addresses [heads, sides, dim] of a slot."""
        return self.maps[layer][slot // self.paged.size, :, slot % self.paged.size]

    def put(self, memory: list[np.ndarray], slots: list[int], rows: np.ndarray) -> None:
        """Write rows [n, layers, heads, sides, dim] into `memory`; padding is skipped."""
        for item, slot in enumerate(slots):
            for layer, buffer in enumerate(self.of_layer):
                if slot >= 0:
                    memory[buffer][self.at(layer, slot)] = rows[item, layer]

    def take(self, memory: list[np.ndarray], slots: list[int]) -> np.ndarray:
        """Rows [n, layers, heads, sides, dim] of `memory`; zeros for padding."""
        paged = self.paged
        kind = memory[0].dtype
        rows = np.zeros(
            (len(slots), len(self.maps), paged.heads, paged.sides, paged.dim), dtype=kind
        )
        for item, slot in enumerate(slots):
            for layer, buffer in enumerate(self.of_layer):
                if slot >= 0:
                    rows[item, layer] = memory[buffer][self.at(layer, slot)]
        return rows

    def load(self, memory: list[np.ndarray]) -> None:
        """Make the buffers hold `memory`."""
        for buffer, values in zip(self.buffers, memory, strict=True):
            buffer.copy_(torch.from_numpy(values))


@dataclass(frozen=True)
class Shape:
    """What a drawn cache is like; `make` builds it on a device."""

    layout: str
    dtype: torch.dtype
    layers: int
    blocks: int
    heads: int
    size: int
    dim: int
    numbers: tuple[int, ...]
    apart: tuple[bool, ...] = ()
    """By layer: in a buffer of its own? Without it, none is."""
    turned: bool = False
    """Layers lie in memory last to first."""
    gaps: tuple[int, int, int] = (0, 0, 0)
    """Unused places after a row's elements, a block's slots and the blocks."""
    step: int = 1
    """Distance of a row's elements."""
    shift: int = 0
    """Elements before the first."""

    @property
    def slots(self) -> int:
        """Slots of the cache."""
        return self.blocks * self.size

    def make(self, device: str, seed: int = 0) -> Drawn:
        """The cache, in memory full of noise."""
        layout = Layout.named(self.layout)
        after, between, behind = self.gaps
        used = {
            "L": self.layers,
            "B": self.blocks,
            "H": self.heads,
            "N": self.size,
            "S": layout.sides,
            "D": self.dim,
            "C": 2 * self.dim,
        }
        room = {**used, "B": used["B"] + behind, "N": used["N"] + between}
        room |= {axis: (used[axis] + after) * self.step for axis in "DC"}
        stride, total = {}, 1
        for axis in reversed(layout.memory):
            stride[axis], total = total, total * room[axis]
        stride |= {axis: self.step for axis in "DC"}
        bits = BITS[self.dtype.itemsize]
        noise = np.random.default_rng(seed)
        buffers, of_layer, tensors, maps = [], [], [], []

        def buffer() -> int:
            values = noise.integers(
                0, 256, (total + self.shift) * self.dtype.itemsize, dtype=np.uint8
            )
            buffers.append(torch.from_numpy(values).view(bits).to(device))
            return len(buffers) - 1

        shared = buffer()
        for layer, alone in enumerate(self.apart or (False,) * self.layers):
            mine = buffer() if alone else shared
            at = self.shift + (self.layers - 1 - layer if self.turned else layer) * stride["L"]
            shape, strides = (
                [used[axis] for axis in layout.axes],
                [stride[axis] for axis in layout.axes],
            )
            of_layer.append(mine)
            tensors.append(buffers[mine].view(self.dtype).as_strided(shape, strides, at))
            maps.append(
                layout.view(torch.arange(total + self.shift).as_strided(shape, strides, at)).numpy()
            )
        return Drawn(
            layout, self.dtype, buffers, of_layer, maps, Paged(tensors, layout, self.numbers)
        )


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Caches of any layout, dtype, geometry and placement."""
    layout = draw(st.sampled_from(every()))
    layers = draw(st.integers(1, 3))
    plain = draw(st.booleans())  # half of them as engines make them, half of them of any strides
    dim = draw(
        st.sampled_from(
            [16, 24, 32, 64, 128] if plain else [16, 17, 18, 20, 36, 48, 66, 72, 96, 130]
        )
    )
    return Shape(
        layout=layout,
        dtype=draw(st.sampled_from(DTYPES)),
        layers=layers,
        blocks=draw(st.integers(1, 5)),
        heads=1 if "H" not in Layout.named(layout).axes else draw(st.integers(1, 3)),
        size=draw(st.sampled_from([1, 2, 4, 8, 16] if plain else [1, 2, 3, 5, 7])),
        dim=dim,
        numbers=tuple(
            draw(st.lists(st.integers(0, 40), min_size=layers, max_size=layers, unique=True))
        ),
        apart=tuple(draw(st.lists(st.booleans(), min_size=layers, max_size=layers))),
        turned=draw(st.booleans()),
        gaps=(0, 0, 0) if plain else tuple(draw(st.integers(0, 3)) * scale for scale in (2, 1, 1)),
        step=1 if plain else draw(st.sampled_from([1, 1, 2])),
        shift=0 if plain else draw(st.integers(0, 3)),
    )


@st.composite
def mappings(draw: st.DrawFn, shape: Shape, unique: bool = True) -> list[int]:
    """Slots in any order, whole blocks among them, with padding; with `unique` none comes twice."""
    blocks = draw(st.lists(st.integers(0, shape.blocks - 1), max_size=shape.blocks, unique=True))
    listed = [block * shape.size + place for block in blocks for place in range(shape.size)]
    others = [slot for slot in range(shape.slots) if slot not in listed or not unique]
    singles = draw(st.lists(st.sampled_from(others), max_size=8, unique=unique)) if others else []
    slots = singles + listed if draw(st.booleans()) else listed + singles
    for _ in range(draw(st.integers(0, 3))):
        slots.insert(draw(st.integers(0, len(slots))), draw(st.sampled_from([-1, -7, -(2**40)])))
    return slots


@st.composite
def contents(draw: st.DrawFn, count: int) -> list[int]:
    """Content ids, 64 bits."""
    return [draw(st.integers(0, 2**64 - 1)) for _ in range(min(count, 6))] + [
        (7919 * i * i + 0x9E3779B97F4A7C15 * i) % 2**64 for i in range(6, count)
    ]


def ids(values: list[int], device: str) -> torch.Tensor:
    """Unsigned numbers as int64."""
    return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64)).to(device)


def index(values: list[int], device: str) -> torch.Tensor:
    """Slots or blocks."""
    return torch.tensor(values, dtype=torch.int64, device=device)
