# SPDX-License-Identifier: Apache-2.0
"""What connectors ask of vLLM's attention kernels, where the harness's model has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def any_block_size(backends: Callable[..., Any]) -> Callable[..., Any]:
    """`get_current_attn_backends` with another answer where no attention layer can be asked: this machine's backend, had it a kernel for
    every block size. Where there are layers (the live engine) the answer is theirs."""

    def found(config: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.v1.attention.backend import MultipleOf

        theirs = backends(config, *args, **kwargs)
        if any(
            hasattr(layer, "get_attn_backend")
            for layer in config.compilation_config.static_forward_context.values()
        ):
            return theirs

        class AnyBlockSize(theirs[0]):  # type: ignore[misc,valid-type]
            """The backend of this machine with kernels for every block size."""

            @staticmethod
            def get_supported_kernel_block_sizes(*_: Any) -> list[Any]:
                return [MultipleOf(1)]

        return [AnyBlockSize]

    return found
