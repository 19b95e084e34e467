# SPDX-License-Identifier: Apache-2.0
"""Copies between the engine's pages and LMCache's chunks on the CPU, for adapter `lmcache-cpu`.

A slot is `block * block_size + offset`. Pages are one tensor per layer: [blocks, heads, block_size, 2 * head_size] since vLLM 0.26, with K
in the first half of a row; [blocks, 2, block_size, heads, head_size] or [2, blocks, ...] before; [blocks, 1, block_size, size] or
[blocks, block_size, size] where K and V are one latent vector. A chunk holds all layers, [K or V, layers, tokens, heads * head_size], or
layer by layer one, [tokens, K or V, heads * head_size].

On vLLM's CPU attention the bytes of a block are packed in an order of its own; the copies are exact there for whole blocks, which is all
that LMCache moves while its chunks are multiples of a block and incomplete chunks are not saved (its default).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from lmcache.v1.gpu_connector.gpu_connectors import (
    GPUConnectorInterface,
    VLLMPagedMemLayerwiseGPUConnector,
)
from lmcache.v1.memory_management import MemoryFormat


class Pages:
    """One layer's tensor, by slots."""

    def __init__(self, tensor: torch.Tensor, latent: bool) -> None:
        if tensor.dim() == 3:
            tensor = tensor.unsqueeze(1)
        packed = tensor.dim() == 4
        if not packed:  # to [blocks, heads, block_size, K or V, head_size]
            tensor = tensor.permute((1, 3, 2, 0, 4) if tensor.shape[0] == 2 else (0, 3, 2, 1, 4))
        self.tensor, self.packed, self.latent, self.block_size = (
            tensor,
            packed,
            latent,
            tensor.shape[2],
        )

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows [tokens, K or V, heads * head_size] of slots [tokens]."""
        rows = self.tensor[slots // self.block_size, :, slots % self.block_size]
        if self.packed:
            rows = rows.unflatten(-1, (1, -1) if self.latent else (2, -1))
        return rows.transpose(1, 2).flatten(2)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Put such rows there."""
        heads = self.tensor.shape[1]
        rows = rows.unflatten(-1, (heads, -1)).transpose(1, 2)
        if self.packed:
            rows = rows.flatten(2)
        self.tensor[slots // self.block_size, :, slots % self.block_size] = rows.to(
            self.tensor.dtype
        )


class _Pages(GPUConnectorInterface):
    """What both classes share. LMCache hands over the layers' tensors, `kvcaches`, with every call."""

    def __init__(self, metadata: Any) -> None:
        self.layers, kinds, _, heads, size = metadata.kv_shape
        self.latent: bool = kinds == 1
        self.kinds, self.hidden = kinds, heads * size
        self.format = MemoryFormat.KV_MLA_FMT if self.latent else None

    def _pages(self, kwargs: dict[str, Any]) -> list[Pages]:
        if "kvcaches" not in kwargs or "slot_mapping" not in kwargs:
            raise ValueError("LMCache asked for a copy without pages or without slots")
        return [Pages(tensor, self.latent) for tensor in kwargs["kvcaches"]]

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        raise NotImplementedError

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        raise NotImplementedError


class Transfer(_Pages):
    """All layers at once, as LMCache's VLLMPagedMemGPUConnectorV2: what is cached locally (`vllm_cached_tokens`) is not written."""

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Chunk [start, end) of the request to its slots."""
        assert memory_obj.tensor is not None, "LMCache handed over a chunk that it has freed"
        first = start + min(end - start, max(0, kwargs.get("vllm_cached_tokens", 0) - start))
        slots = kwargs["slot_mapping"][first:end]
        for layer, pages in enumerate(self._pages(kwargs)):
            pages.write(slots, memory_obj.tensor[:, layer, first - start :].transpose(0, 1))

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """The slots of [start, end) of the request to a chunk."""
        slots = kwargs["slot_mapping"][start:end]
        for layer, pages in enumerate(self._pages(kwargs)):
            memory_obj.tensor[:, layer] = pages.read(slots).transpose(0, 1)
        if self.format is not None:
            memory_obj.metadata.fmt = self.format

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any
    ) -> None:
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(chunk, start, end, **kwargs)

    def batched_from_gpu(
        self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(chunk, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([self.kinds, self.layers, num_tokens, self.hidden])


class LayerwiseTransfer(_Pages):
    """Layer by layer, as LMCache's VLLMPagedMemLayerwiseGPUConnector: two generators that LMCache drives, and all slots of a chunk are
    written, whether they are cached locally or not."""

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any
    ) -> Generator[None, Any, None]:
        """Is sent the chunks of one layer after the other; yields layers + 2 times. The first two arguments are `starts` and `ends`."""
        first, last = memory_objs, starts
        pages, slots = self._pages(kwargs), kwargs["slot_mapping"]
        for layer in pages:
            chunks = yield
            for start, end, chunk in zip(first, last, chunks, strict=True):
                layer.write(
                    slots[start:end], chunk.tensor.view(end - start, self.kinds, self.hidden)
                )
        yield
        yield

    def batched_from_gpu(
        self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
    ) -> Generator[None, None, None]:
        """Fills memory_objs[layer][chunk], one layer per step; yields layers + 1 times."""
        for layer, chunks in zip(self._pages(kwargs), memory_objs, strict=True):
            for start, end, chunk in zip(starts, ends, chunks, strict=True):
                rows = layer.read(kwargs["slot_mapping"][start:end])
                chunk.tensor.copy_(rows.view(chunk.tensor.shape))
                if self.format is not None:
                    chunk.metadata.fmt = self.format
            yield
        yield

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size(
            [num_tokens, self.hidden] if self.latent else [num_tokens, 2, self.hidden]
        )


VLLMPagedMemLayerwiseGPUConnector.register(
    LayerwiseTransfer
)  # LMCache asserts that it is one of its own
