# SPDX-License-Identifier: Apache-2.0
"""A connector that invents KV: it has the KV of every token, and all of it is zero.

Such connectors serve to measure decoding without a prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvconform.refimpl.variants.decoy import Decoy


@dataclass
class Blocks(KVConnectorMetadata):
    """Blocks to fill before the forward pass."""

    ids: list[int] = field(default_factory=list)


class Zeros(Decoy):
    """Claims all whole blocks before a request's last token, and fills them with zeros.

    Stores nothing.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Ranks that split the tokens of a block have their share of it.
        ranks = vllm_config.parallel_config.decode_context_parallel_size
        self._size = vllm_config.cache_config.block_size * ranks
        self._granted: list[int] = []
        self._layers: dict[str, torch.Tensor] = {}

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return what the suite must know. vLLM's DecodeBenchConnector is of this kind."""
        return {"synthesises_kv": True}

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        end = (request.num_tokens - 1) // self._size * self._size
        return max(0, end - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            end = (request.num_tokens - 1) // self._size
            start = end - num_external_tokens // self._size
            # Block 0 stands for what has left a sliding window.
            self._granted += [block for block in blocks.get_block_ids()[0][start:end] if block]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        granted, self._granted = self._granted, []
        return Blocks(granted)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # An attention kernel may split each block into several of its own.
        blocks = self._kv_cache_config.num_blocks
        self._layers = {name: layer.unflatten(0, (blocks, -1)) for name, layer in kv_caches.items()}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Blocks)
        for layer in self._layers.values():
            layer[metadata.ids] = 0
