# SPDX-License-Identifier: Apache-2.0
"""Attention backends for connectors that query them where the model has no attention layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def any_block_size(backends: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for vLLM's `get_current_attn_backends`.

    Without attention layers it returns this machine's backend with kernels for every block size.
    With attention layers (the live engine) it returns what vLLM's own function returns.
    """

    def found(config: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.v1.attention.backend import MultipleOf

        theirs = backends(config, *args, **kwargs)
        layers = config.compilation_config.static_forward_context.values()
        if any(hasattr(layer, "get_attn_backend") for layer in layers):
            return theirs

        class AnyBlockSize(theirs[0]):  # type: ignore[misc,valid-type]
            """The backend of this machine with kernels for every block size."""

            @staticmethod
            def get_supported_kernel_block_sizes(*_: Any) -> list[Any]:
                return [MultipleOf(1)]

        return [AnyBlockSize]

    return found
