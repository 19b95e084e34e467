# SPDX-License-Identifier: Apache-2.0
"""A connector written from the contract alone; it shares no code with the reference connector.

Its unit is the engine's block, and its key the engine's block hash. Its only state per request is
a block table. It does nothing about preemptions or failures. Many connectors begin like this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

Key = tuple[int, bytes]
"""Number of resets before the block was stored, and the block's hash."""


@dataclass
class PlainMetadata(KVConnectorMetadata):
    """(key, block id) pairs to read and to write."""

    loads: list[tuple[Key, int]] = field(default_factory=list)
    saves: list[tuple[Key, int]] = field(default_factory=list)


class Plain(KVConnectorBase_V1):
    """A cache of whole blocks in this process's memory, loaded synchronously."""

    _stores: ClassVar[dict[str, dict[tuple[Key, str], torch.Tensor]]] = {}
    _resets: ClassVar[dict[str, int]] = {}

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        name = self._kv_transfer_config.kv_connector_extra_config.get(
            "store", self._kv_transfer_config.engine_id
        )
        self._blocks = self._stores.setdefault(
            f"rank {vllm_config.parallel_config.rank} of {name}", {}
        )
        self._index = self._stores.setdefault(f"index of {name}", {})
        self._name = name
        self._resets.setdefault(name, 0)
        # Ranks that split the tokens of a block have a part of it each.
        slices = vllm_config.parallel_config.decode_context_parallel_size
        self._size = vllm_config.cache_config.block_size * slices
        self._live: dict[str, tuple[Any, list[int]]] = {}
        self._to_load: dict[str, int] = {}

    def _keys(self, request: Any) -> list[Key]:
        resets = self._resets[self._name]
        return [(resets, block) for block in request.block_hashes]

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        usable = self._keys(request)[: (request.num_tokens - 1) // self._size]
        missing = (index for index, block in enumerate(usable) if (block, "") not in self._index)
        found = next(missing, len(usable))
        return max(0, found * self._size - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._live[request.request_id] = request, list(blocks.get_block_ids()[0])
        if num_external_tokens:
            self._to_load[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta = PlainMetadata()
        cached = scheduler_output.scheduled_cached_reqs
        # Request -> (computed tokens, blocks, whether the blocks replace its table).
        rows: dict[str, tuple[int, Any, bool]] = {}
        for entry in scheduler_output.scheduled_new_reqs:
            rows[entry.req_id] = (entry.num_computed_tokens, entry.block_ids, True)
        for req, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            rows[req] = (computed, blocks, req in cached.resumed_req_ids)
        for req, (computed, blocks, replaces) in rows.items():
            request, table = self._live[req]
            if not replaces and blocks is not None:
                table.extend(blocks[0])
            external = self._to_load.pop(req, 0)
            pairs = list(zip(self._keys(request), table, strict=False))
            start, end = (computed - external) // self._size, computed // self._size
            # Block 0 stands for what a window has left behind, and belongs to no request.
            meta.loads += [(block, at) for block, at in pairs[start:end] if at != 0]
            end = min(computed + scheduler_output.num_scheduled_tokens[req], request.num_tokens)
            for block, at in pairs[: end // self._size]:
                if at != 0 and (block, "") not in self._index:
                    meta.saves.append((block, at))
        return meta

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._live.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool | None:
        # Steps that are on their way to the workers load and save under the old number.
        resets = self._resets[self._name]
        # The index, and the blocks of every rank.
        ours = [entries for name, entries in self._stores.items() if self._is_ours(name)]
        for entries in ours:
            for entry in [entry for entry in entries if entry[0][0] < resets]:
                del entries[entry]
        self._resets[self._name] = resets + 1
        return True

    def _is_ours(self, store: str) -> bool:
        return store.endswith(f" of {self._name}")

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # An attention kernel may split each block into several of its own.
        blocks = self._kv_cache_config.num_blocks
        self._layers = {name: layer.unflatten(0, (blocks, -1)) for name, layer in kv_caches.items()}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlainMetadata)
        for block, at in metadata.loads:
            for name, layer in self._layers.items():
                layer[at] = self._blocks[block, name]

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlainMetadata)
        for block, at in metadata.saves:
            for name, layer in self._layers.items():
                self._blocks[block, name] = layer[at].clone()
            self._index[block, ""] = torch.empty(0)


class Consuming(Plain):
    """Its worker half consumes the metadata, as that of OffloadingConnector does."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlainMetadata)
        while metadata.loads:
            block, at = metadata.loads.pop()
            for name, layer in self._layers.items():
                layer[at] = self._blocks[block, name]

    def wait_for_save(self) -> None:
        super().wait_for_save()
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlainMetadata)
        metadata.saves.clear()
