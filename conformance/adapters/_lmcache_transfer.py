# SPDX-License-Identifier: Apache-2.0
"""Copies between the engine's pages and LMCache's chunks on the CPU, for adapter `lmcache-cpu`.

A slot is `block * block_size + offset`. Pages are one tensor per layer:

- since vLLM 0.26: [blocks, heads, block_size, 2 * head_size], with K in the first half of a row;
- before: [blocks, 2, block_size, heads, head_size] or [2, blocks, block_size, heads, head_size];
- where K and V are one latent vector: [blocks, 1, block_size, size] or [blocks, block_size, size].

A chunk holds all layers, [K or V, layers, tokens, heads * head_size], or, layer by layer, one:
[tokens, K or V, heads * head_size].

vLLM's CPU attention packs the bytes of a block in its own order. The copies are exact there for
whole blocks only. LMCache moves only whole blocks while its chunks are multiples of a block and
incomplete chunks are not saved (its default).
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

from kvconform.adapters import _lmcache_metrics as metrics


class Pages:
    """One layer's tensor, addressed by slots."""

    def __init__(self, tensor: torch.Tensor, latent: bool) -> None:
        if tensor.dim() == 3:
            tensor = tensor.unsqueeze(1)
        packed = tensor.dim() == 4
        if not packed:  # to [blocks, heads, block_size, K or V, head_size]
            kv_first = tensor.shape[0] == 2
            tensor = tensor.permute((1, 3, 2, 0, 4) if kv_first else (0, 3, 2, 1, 4))
        self.tensor = tensor
        self.packed = packed
        self.latent = latent
        self.block_size = tensor.shape[2]

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows [tokens, K or V, heads * head_size] of slots [tokens]."""
        rows = self.tensor[slots // self.block_size, :, slots % self.block_size]
        if self.packed:
            rows = rows.unflatten(-1, (1, -1) if self.latent else (2, -1))
        return rows.transpose(1, 2).flatten(2)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows [tokens, K or V, heads * head_size] to slots [tokens]."""
        heads = self.tensor.shape[1]
        rows = rows.unflatten(-1, (heads, -1)).transpose(1, 2)
        if self.packed:
            rows = rows.flatten(2)
        self.tensor[slots // self.block_size, :, slots % self.block_size] = rows.to(
            self.tensor.dtype
        )


class _Pages(GPUConnectorInterface):
    """Base of both transfer classes.

    LMCache passes the layers' tensors, `kvcaches`, with every call.
    """

    def __init__(self, metadata: Any) -> None:
        self.layers, kinds, _, heads, size = metadata.kv_shape
        self.latent: bool = kinds == 1
        self.kinds = kinds
        self.hidden = heads * size
        self.format = MemoryFormat.KV_MLA_FMT if self.latent else None

    def _pages(self, kwargs: dict[str, Any]) -> list[Pages]:
        if "kvcaches" not in kwargs or "slot_mapping" not in kwargs:
            raise ValueError("LMCache requested a copy without kvcaches or without slot_mapping")
        return [Pages(tensor, self.latent) for tensor in kwargs["kvcaches"]]

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Raise NotImplementedError; a subclass may override it."""
        raise NotImplementedError

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Raise NotImplementedError; a subclass may override it."""
        raise NotImplementedError


class Transfer(_Pages):
    """Transfer of all layers at once, like LMCache's VLLMPagedMemGPUConnectorV2.

    Tokens that are cached locally (`vllm_cached_tokens`) are not written.
    """

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Write the chunk of the request's tokens [start, end) to their slots."""
        assert memory_obj.tensor is not None, "LMCache passed a chunk that it has freed"
        metrics.facts["bytes_loaded"] += memory_obj.get_size()
        first = start + min(end - start, max(0, kwargs.get("vllm_cached_tokens", 0) - start))
        slots = kwargs["slot_mapping"][first:end]
        for layer, pages in enumerate(self._pages(kwargs)):
            pages.write(slots, memory_obj.tensor[:, layer, first - start :].transpose(0, 1))

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Read the slots of the request's tokens [start, end) into a chunk."""
        slots = kwargs["slot_mapping"][start:end]
        metrics.facts["tokens_saved"] += end - start
        for layer, pages in enumerate(self._pages(kwargs)):
            memory_obj.tensor[:, layer] = pages.read(slots).transpose(0, 1)
        if self.format is not None:
            memory_obj.metadata.fmt = self.format

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any
    ) -> None:
        """Write each chunk to the slots of its range of tokens."""
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(chunk, start, end, **kwargs)

    def batched_from_gpu(
        self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        """Read each range of tokens into its chunk."""
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(chunk, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of a chunk: [K or V, layers, tokens, heads * head_size]."""
        return torch.Size([self.kinds, self.layers, num_tokens, self.hidden])


class LayerwiseTransfer(_Pages):
    """Transfer layer by layer, like LMCache's VLLMPagedMemLayerwiseGPUConnector.

    LMCache drives its two generators. All slots of a chunk are written, also those that are cached
    locally. As there, the layers are as many as LMCache counts, and IndexError is raised if the
    engine has registered fewer.
    """

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any
    ) -> Generator[None, Any, None]:
        """Write the chunks that are sent to the generator, one layer after the other.

        Yields layers + 2 times. LMCache passes `starts` and `ends` as the first two arguments.
        """
        first = memory_objs
        last = starts
        pages = self._pages(kwargs)
        slots = kwargs["slot_mapping"]
        for layer in range(self.layers):
            chunks = yield
            for start, end, chunk in zip(first, last, chunks, strict=True):
                pages[layer].write(
                    slots[start:end], chunk.tensor.view(end - start, self.kinds, self.hidden)
                )
        yield
        yield

    def batched_from_gpu(
        self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
    ) -> Generator[None, None, None]:
        """Fill memory_objs[layer][chunk], one layer per step; yields layers + 1 times."""
        pages = self._pages(kwargs)
        metrics.facts["tokens_saved"] += sum(ends) - sum(starts)
        for layer in range(self.layers):
            for start, end, chunk in zip(starts, ends, memory_objs[layer], strict=True):
                rows = pages[layer].read(kwargs["slot_mapping"][start:end])
                chunk.tensor.copy_(rows.view(chunk.tensor.shape))
                if self.format is not None:
                    chunk.metadata.fmt = self.format
            yield
        yield

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of a chunk: [tokens, K or V, heads * head_size], or without K or V."""
        if self.latent:
            return torch.Size([num_tokens, self.hidden])
        return torch.Size([num_tokens, 2, self.hidden])


# LMCache asserts that the class is one of its own.
VLLMPagedMemLayerwiseGPUConnector.register(LayerwiseTransfer)
