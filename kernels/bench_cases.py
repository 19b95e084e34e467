# SPDX-License-Identifier: Apache-2.0
"""The benchmark's cases: each kernel on a cache of one layout and size, and its alternatives."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvconform.kernels.device import choose
from kvconform.kernels.digest import digest
from kvconform.kernels.layout import Layout
from kvconform.kernels.paged import Paged
from kvconform.kernels.poison import poison
from kvconform.kernels.transfer import gather, scatter
from kvconform.kernels.verify import verify
from kvconform.kernels.write import write

SIZE = 16
"""Tokens per page."""
SPARE = 8
"""Unused pages of a cache, so that the slots are not simply all of them."""


@dataclass(frozen=True)
class Case:
    """One call to time. `passes`: how often it moves the cache's bytes (2: reads and writes)."""

    kernel: str
    by: str
    passes: int
    call: Callable[[], object]


class Bench:
    """A cache with `tokens` tokens in pages of random order, and buffers of the same size.

    It has 32 layers of 8 heads of 128 elements, or of one latent head of 576. `nbytes`: size of the
    tokens' KV in bytes.
    """

    def __init__(
        self, layout: str, tokens: int, dtype: torch.dtype, device: torch.device, layers: int = 32
    ) -> None:
        self.layout = Layout.named(layout)
        self.tokens = tokens
        self.dtype = dtype
        self.device = device
        heads, dim = (1, 576) if self.layout.sides == 1 else (8, 128)
        pages = -(-tokens // SIZE)
        self.tensors = self.layout.allocate(layers, pages + SPARE, heads, SIZE, dim, dtype, device)
        self.paged = Paged(self.tensors, self.layout)
        shuffle = torch.Generator().manual_seed(tokens)
        order = torch.randperm(pages + SPARE, generator=shuffle)[:pages]
        self.blocks = order.to(device)
        self.slots = (order[:, None] * SIZE + torch.arange(SIZE)).flatten()[:tokens].to(device)
        self.content = torch.randint(-(1 << 62), 1 << 62, (tokens,), generator=shuffle).to(device)
        self.marks = self.content[:pages]
        self.nbytes = tokens * layers * self.paged.slot_bytes
        write(self.paged, self.slots, self.content)
        self.rows = gather(self.paged, self.slots)
        self.backend = "triton" if choose(device, None) else "torch"

    @staticmethod
    def bytes_of(layout: str, tokens: int, dtype: torch.dtype, layers: int = 32) -> int:
        """Return the bytes that a bench takes: the cache, the rows, source and target of a copy."""
        slot = 576 if Layout.named(layout).sides == 1 else 2 * 8 * 128
        return 4 * (tokens + SPARE * SIZE) * layers * slot * dtype.itemsize

    def kernels(self) -> Iterator[Case]:
        """Yield the kernels of this package, as they are dispatched on this device."""
        paged, slots, content = self.paged, self.slots, self.content
        verdict = verify(paged, slots, content)
        if not verdict.holds():
            raise RuntimeError(f"the cache does not hold what was written: {verdict.first()}")
        yield Case("write", self.backend, 1, lambda: write(paged, slots, content))
        yield Case("verify", self.backend, 1, lambda: verify(paged, slots, content))
        yield Case("gather", self.backend, 2, lambda: gather(paged, slots, self.rows))
        yield Case("scatter", self.backend, 2, lambda: scatter(paged, slots, self.rows))
        yield Case("digest", self.backend, 1, lambda: digest(paged, self.blocks))
        yield Case("poison", self.backend, 1, lambda: poison(paged, self.blocks, self.marks))

    def torch_index(self) -> Iterator[Case]:
        """Yield the same work by torch's index operations, a call per layer.

        `write` gets its values computed in advance.
        """
        views = [self.layout.view(tensor) for tensor in self.tensors]
        blocks, places = self.slots // SIZE, self.slots % SIZE

        def take() -> None:
            for layer, view in enumerate(views):
                self.rows[layer] = view[blocks, :, places]

        def put() -> None:
            for layer, view in enumerate(views):
                view[blocks, :, places] = self.rows[layer]

        yield Case("gather", "torch index", 2, take)
        yield Case("scatter", "torch index", 2, put)
        yield Case("write", "torch index_put of precomputed rows", 2, put)

    def vllm(self) -> Iterator[Case | str]:
        """Yield the `reshape_and_cache_flash` of vLLM, a call per layer; a note if not installed.

        Nothing for a layout that it does not take.
        """
        if self.layout.name not in ("kv-first", "kv-second") or self.dtype.itemsize != 2:
            return
        try:
            importlib.import_module("vllm._custom_ops")
            flash = torch.ops._C_cache_ops.reshape_and_cache_flash
        except (ImportError, AttributeError, RuntimeError):
            yield "vLLM's reshape_and_cache_flash is not installed"
            return
        sides = [
            tensor.unbind(0 if self.layout.name == "kv-first" else 1) for tensor in self.tensors
        ]
        keys = self.rows[:, :, :, 0].contiguous()
        values = self.rows[:, :, :, 1].contiguous()
        one = torch.ones(1, dtype=torch.float32, device=self.device)

        def call() -> None:
            for layer, (key, value) in enumerate(sides):
                flash(keys[layer], values[layer], key, value, self.slots, "auto", one, one)

        yield Case("scatter", "vLLM reshape_and_cache_flash", 2, call)

    def lmcache(self) -> Iterator[Case | str]:
        """Yield LMCache's `multi_layer_kv_transfer`; a note if not installed, or if it refuses.

        Nothing for a layout that it does not take, and on the CPU.
        """
        formats = {"kv-first": "NL_X_TWO_NB_BS_NH_HS", "kv-second": "NL_X_NB_TWO_BS_NH_HS"}
        if (
            self.layout.name not in formats
            or self.dtype.itemsize != 2
            or self.device.type != "cuda"
        ):
            return
        try:
            ops: Any = importlib.import_module("lmcache.c_ops")
            kinds = getattr(ops, "EngineKVFormat", None) or ops.GPUKVFormat
            kind = getattr(kinds, formats[self.layout.name])
            ways = ops.TransferDirection
        except (ImportError, AttributeError):
            yield "LMCache's kernels are not installed, or have an unknown interface"
            return
        pointers = torch.tensor(
            [tensor.data_ptr() for tensor in self.tensors], dtype=torch.int64, device=self.device
        )
        paged = self.paged
        chunk = self.rows.view(2, len(self.tensors), self.tokens, paged.heads * paged.dim)

        def call(way: Any) -> None:
            ops.multi_layer_kv_transfer(
                chunk,
                pointers,
                self.slots,
                self.device,
                paged.slots,
                way,
                kind,
                block_size=SIZE,
                head_size=paged.dim,
            )

        try:
            call(ways.D2H)
        except (TypeError, RuntimeError) as error:
            yield f"LMCache's kernels refuse {self.layout.name}: {str(error).splitlines()[0]}"
            return
        yield Case("gather", "LMCache multi_layer_kv_transfer", 2, lambda: call(ways.D2H))
        yield Case("scatter", "LMCache multi_layer_kv_transfer", 2, lambda: call(ways.H2D))
