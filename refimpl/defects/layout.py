# SPDX-License-Identifier: Apache-2.0
"""KV tensors taken for what they are not."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends import utils

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.faulty import fault


class AssumesContiguous(ReferenceConnector):
    """Finds a block's bytes behind those of the block before, as in the layout that it was written for (B093)."""

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


class KeysOfTheLatent(ReferenceConnector):
    """With MLA, stores the first half of the vector, as there is no V to be stored (B102)."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._vllm_config.model_config.use_mla:
            kv_caches = {
                name: layer[..., : layer.shape[-1] // 2] for name, layer in kv_caches.items()
            }
        super().register_kv_caches(kv_caches)


class WantsUnknownLayout(ReferenceConnector):
    """Requires a layout that there is not."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "BHND"


class WantsTokensFirst(ReferenceConnector):
    """Correct: requires the tokens outside of the heads, and works with what it gets."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "NHD"


@fault(utils, "get_kv_connector_cache_layout")
def asks_nobody(ask: Any, *args: Any) -> None:
    """Does not ask the connector which layout it requires (B097)."""


@fault(kv_cache_interface, "create_kv_cache_views")
def swaps_heads_and_tokens(create: Any, *args: Any, **kwargs: Any) -> Any:
    """Registers tensors with tokens before heads."""
    return [view.transpose(1, 2) for view in create(*args, **kwargs)]
