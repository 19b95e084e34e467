# SPDX-License-Identifier: Apache-2.0
"""Planted defects: keys that an engine with another format of KV finds in the same store."""

from __future__ import annotations

import copy
from array import array
from typing import TYPE_CHECKING

import torch

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.keys import digest, request_key, root_key
from kvconform.refimpl.paging import blocks_first, read_slots, write_slots
from kvconform.refimpl.plan import Piece, Save

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

EVERY_LAYER = "all"


class _OneRoot(ReferenceConnector):
    """Makes the root of its keys of a configuration in which something is always the same."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = copy.copy(vllm_config)
        for name in ("model_config", "cache_config", "parallel_config"):
            setattr(config, name, copy.copy(getattr(config, name)))
        self._level(config)
        self._root = root_key(config)

    def _level(self, config: VllmConfig) -> None:
        """Make equal what the keys do not tell apart; changes the configuration."""
        raise NotImplementedError


class AnyDtype(_OneRoot):
    """Leaves the model's data type out of its keys."""

    def _level(self, config: VllmConfig) -> None:
        config.model_config.dtype = torch.float32


class AnyCacheDtype(_OneRoot):
    """Leaves the data type of the KV cache out of its keys."""

    def _level(self, config: VllmConfig) -> None:
        config.cache_config.cache_dtype = "auto"


class ByTensorDtype(_OneRoot):
    """Takes the data type of the KV tensors into its keys, which all formats of bytes share."""

    def _level(self, config: VllmConfig) -> None:
        config.cache_config.cache_dtype = config.cache_config.cache_dtype.partition("_")[0]


class AnyRuns(_OneRoot):
    """Leaves out of its keys how many tokens in a row a rank holds that splits those of a block."""

    def _level(self, config: VllmConfig) -> None:
        config.parallel_config.cp_kv_cache_interleave_size = 1


class OneInARow(ReferenceConnector):
    """Takes every second token of a block for its rank's own, however many are in a row."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._share = self._share._replace(run=1)


class AnyCodec(_OneRoot):
    """Leaves the codec out of its keys."""

    def _level(self, config: VllmConfig) -> None:
        """Change nothing: the root is made without the codec."""


class AnyBlockSize(ReferenceConnector):
    """Names chunks by the prompt and their number, and a chunk has as many tokens as a block."""

    def _keys(self, request: Request, keys: list[str], end: int) -> list[str]:
        root = request_key(self._root, request)
        prompt = array("q", request.prompt_token_ids or ()).tobytes()
        for number in range(len(keys), end // self.options.chunk_tokens):
            keys.append(digest(root, prompt, str(number)).hex())
        return keys


class AnyLayout(ReferenceConnector):
    """Stores the bytes of a block as they lie in memory; keys do not have their order."""

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        if self._is_sound(save):
            for piece in save.pieces:
                data = self._page(kv_layer, piece).flatten().view(torch.uint8).numpy().tobytes()
                self._put(epoch, piece.key, layer, data, len(piece.slots))

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        data = self._get(piece.key, layer)
        if data is None:
            return False
        page = self._page(self._layers[layer], piece, of_memory=True)
        stored = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(page.dtype)
        page.copy_(stored.view(page.shape))
        return True

    def _page(self, layer: torch.Tensor, piece: Piece, *, of_memory: bool = False) -> torch.Tensor:
        """Return the block of a piece, with its axes in the order of memory; a copy, or a view."""
        block = blocks_first(layer)[piece.slots[0] // self._block_size]
        order = sorted(range(block.dim()), key=block.stride, reverse=True)
        page = block.permute(order)
        return page if of_memory else page.contiguous()


class OwnNumberOfBlocks(ReferenceConnector):
    """Has the number of the engine's blocks in its keys, which depends on what memory is free."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._root = digest(self._root, str(kv_cache_config.num_blocks))


class AnyNumberOfRanks(_OneRoot):
    """Leaves the number of ranks out of its keys.

    What is stored is not stored again: the first of two ranks takes the value of an engine with one
    rank, which has all heads, for its own.
    """

    def _level(self, config: VllmConfig) -> None:
        config.parallel_config.world_size = 1

    def _put(self, epoch: int, key: str, layer: str, data: bytes, tokens: int) -> None:
        if self._get(key, layer) is None:
            super()._put(epoch, key, layer, data, tokens)


class OneRootForShardsAndStages(_OneRoot):
    """Has the number of ranks in its keys, and not whether they split the heads or the layers.

    Both give a rank as many bytes of a chunk, which are in one file for all of its layers.
    """

    def _level(self, config: VllmConfig) -> None:
        config.parallel_config.pipeline_parallel_size = 1

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        if layer != next(reversed(self._layers)) or not self._is_sound(save):
            return
        for piece in save.pieces:
            parts = [read_slots(each, piece.slots, self._share) for each in self._layers.values()]
            self._store.put(epoch, piece.key, EVERY_LAYER, b"".join(parts))

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        data = self._store.get(piece.key, EVERY_LAYER)
        if data is None:
            return False
        size = len(data) // len(self._layers)
        start = list(self._layers).index(layer) * size
        kv_layer, mine = self._layers[layer], data[start : start + size]
        return write_slots(kv_layer, piece.slots, mine, piece.first, self._share)
