# SPDX-License-Identifier: Apache-2.0
"""Planted defects: misread layouts of KV tensors, and engine faults about the required layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.faulty import Target, skipped
from kvconform.refimpl.paging import bytes_in, write_slots
from kvconform.refimpl.plan import Piece
from kvconform.refimpl.tracking import Tracked
from kvconform.refimpl.variants.hybrid import HybridConnector
from kvconform.refimpl.variants.plain import Plain, PlainMetadata

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

REQUIRED_LAYOUT = Target("vllm.v1.attention.backends.utils:get_kv_connector_cache_layout")
CREATE_VIEWS = Target("vllm.v1.kv_cache_interface:create_kv_cache_views")


class AssumesContiguous(ReferenceConnector):
    """Assumes that each block's bytes follow those of the block before (B093)."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        def assumed(layer: torch.Tensor) -> torch.Tensor:
            _, heads, tokens, content = layer.shape
            strides = (heads * tokens * content, tokens * content, content, 1)
            last = layer.storage_offset() + sum(
                (size - 1) * stride for size, stride in zip(layer.shape, strides, strict=True)
            )
            inside = last * layer.element_size() < layer.untyped_storage().nbytes()
            return torch.as_strided(layer, layer.shape, strides) if inside else layer

        super().register_kv_caches({name: assumed(layer) for name, layer in kv_caches.items()})


class BlocksOfTheScheduler(ReferenceConnector):
    """Takes the first axis of the tensors for the scheduler's blocks.

    With smaller kernel blocks, that is wrong: block b begins several blocks further on.
    """

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = self._kv_cache_config.num_blocks
        super().register_kv_caches(
            {
                name: layer.as_strided(
                    (blocks, layer.shape[1], self._block_size, layer.shape[3]), layer.stride()
                )
                for name, layer in kv_caches.items()
            }
        )


class OneTokenIsNone(ReferenceConnector):
    """Takes a grant of a single token for none; where a block has one token, it is a block."""

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        granted = num_external_tokens if num_external_tokens > 1 else 0
        super().update_state_after_alloc(request, blocks, granted)


class FirstLayersSize(ReferenceConnector):
    """Takes the bytes of a token in the first layer for those in all layers of the group."""

    def _put(self, epoch: int, key: str, layer: str, data: bytes, tokens: int) -> None:
        first = next(iter(self._layers.values()))
        super()._put(epoch, key, layer, data[: bytes_in(first, range(tokens), self._share)], tokens)


class FirstLayersBlocks(ReferenceConnector):
    """Steps from block to block of every layer by the bytes that one has in the first layer."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        step = next(iter(kv_caches.values())).stride(0)

        def assumed(layer: torch.Tensor) -> torch.Tensor:
            room = layer.untyped_storage().nbytes() // layer.element_size()
            blocks = min(layer.shape[0], (room - layer.storage_offset()) // step)
            return layer.as_strided((blocks, *layer.shape[1:]), (step, *layer.stride()[1:]))

        super().register_kv_caches({name: assumed(layer) for name, layer in kv_caches.items()})


class IdsIn16Bits(ReferenceConnector):
    """Keeps the ids of a request's blocks in 16 bits each, as a compact message does."""

    def _pieces(self, tracked: Tracked, start: int, end: int) -> tuple[Piece, ...]:
        kept = replace(tracked, table=[block % 2**16 for block in tracked.table])
        return super()._pieces(kept, start, end)


class ForgetsTheDrafter(HybridConnector):
    """Registers as many layers as the model has, and none of the drafter's."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        hidden = self._vllm_config.model_config.hf_text_config.num_hidden_layers
        super().register_kv_caches(
            {name: layer for name, layer in kv_caches.items() if number_of(name) < hidden}
        )


class WantsKvOfEveryLayer(ReferenceConnector):
    """Takes the KV of each layer of the model as the forward pass begins (B102).

    Layers without KV have no attribute for it, for example mixtures of experts.
    """

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._metadata().loads:
            layers = forward_context.no_compile_layers
            assert all(layer.kv_cache is not None for layer in layers.values())
        super().start_load_kv(forward_context, **kwargs)


class CountsLayers(ReferenceConnector):
    """Stores a layer under the number in its name, and loads it by its place among the layers.

    They are the same unless a layer of the model has no KV.
    """

    def _put(self, epoch: int, key: str, layer: str, data: bytes, tokens: int) -> None:
        self._store.put(epoch, key, str(number_of(layer)), data)

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        names = list(self._layers)
        place = number_of(names[0]) + names.index(layer)
        data = self._store.get(piece.key, str(place))
        if data is None:
            return True  # as if the layer had no KV
        return write_slots(self._layers[layer], piece.slots, data, piece.first, self._share)


class SortsLayersByName(ReferenceConnector):
    """Numbers the layers as they are registered when it saves, and by their names when it loads.

    They are the same up to ten layers.
    """

    def _put(self, epoch: int, key: str, layer: str, data: bytes, tokens: int) -> None:
        self._store.put(epoch, key, str(list(self._layers).index(layer)), data)

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        data = self._store.get(piece.key, str(sorted(self._layers).index(layer)))
        if data is None:
            return False
        return write_slots(self._layers[layer], piece.slots, data, piece.first, self._share)


def number_of(name: str) -> int:
    """Return the number in the name of a layer."""
    return int(name.split(".")[2])


class BytesOfTheModel(Plain):
    """Copies as many bytes of a block as its values would have in the model's data type.

    Those of a quantised KV cache have one byte: the next block is copied along.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._value = vllm_config.model_config.dtype.itemsize

    def _bytes(self, layer: torch.Tensor, at: int) -> torch.Tensor:
        """Return the bytes that count as those of a block, as a view."""
        start, length = at * layer[at].nbytes, layer[at].numel() * self._value
        return layer.view(torch.uint8).flatten()[start : start + length]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlainMetadata)
        for block, at in metadata.loads:
            for name, layer in self._layers.items():
                there = self._bytes(layer, at)
                there.copy_(self._blocks[block, name][: there.numel()])

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlainMetadata)
        for block, at in metadata.saves:
            for name, layer in self._layers.items():
                self._blocks[block, name] = self._bytes(layer, at).clone()
            self._index[block, ""] = torch.empty(0)


class KeysOfTheLatent(ReferenceConnector):
    """Stores the first half of the latent vector with MLA, as if the rest was V (B102)."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._vllm_config.model_config.use_mla:
            kv_caches = {
                name: layer[..., : layer.shape[-1] // 2] for name, layer in kv_caches.items()
            }
        super().register_kv_caches(kv_caches)


class RefusesInSilence(ReferenceConnector):
    """Does not support MLA, and refuses it by an assertion without words."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert not vllm_config.model_config.use_mla


class WantsUnknownLayout(ReferenceConnector):
    """Requires a layout that does not exist."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "BHND"


class WantsTokensFirst(ReferenceConnector):
    """A correct connector that requires tokens outside of heads, and works with any layout."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "NHD"


asks_nobody = REQUIRED_LAYOUT.replaced_by(skipped)
"""Do not ask the connector which layout it requires (B097)."""


@CREATE_VIEWS.replaced_by
def swaps_heads_and_tokens(create: Any, *args: Any, **kwargs: Any) -> Any:
    """Register tensors with tokens before heads."""
    return [view.transpose(1, 2) for view in create(*args, **kwargs)]
