# SPDX-License-Identifier: Apache-2.0
"""Attention layers whose kernels work on smaller blocks than the scheduler's.

vLLM's worker splits each block of such a layer into kernel blocks (`prepare_kernel_block_sizes`).
A connector learns their size from the tensors, or from the layers' attention backend.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any


def add_layers(config: Any, names: Sequence[str], kernel_block_size: int) -> None:
    """Add attention layers whose only kernel block size is `kernel_block_size` to `config`."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    # A GPU's backends take none of the block sizes of a case; these layers have their own.
    asking = copy.copy(config)
    asking.cache_config = copy.copy(config.cache_config)
    if hasattr(asking.cache_config, "user_specified_block_size"):
        asking.cache_config.user_specified_block_size = False
    with set_current_vllm_config(asking):
        theirs: Any = get_attn_backend(
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_cache_dtype=config.cache_config.cache_dtype,
            use_mla=model.use_mla,
        )

    class OneKernelBlockSize(theirs):  # type: ignore[misc]
        """The backend of this machine with kernels for one block size."""

        @staticmethod
        def get_supported_kernel_block_sizes(*_: Any) -> list[Any]:
            return [kernel_block_size]

    class Layer(AttentionLayerBase):
        """A layer without weights."""

        def __init__(self, name: str) -> None:
            self.layer_name = name

        def get_attn_backend(self) -> Any:
            return OneKernelBlockSize

        def get_kv_cache_spec(self, vllm_config: Any) -> None:
            return None

    layers = config.compilation_config.static_forward_context
    layers.update((name, Layer(name)) for name in names)
