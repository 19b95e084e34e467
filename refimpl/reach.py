# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a request the attention of a KV cache group still reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec


@dataclass(frozen=True)
class Reach:
    """How far back the layers of a group read.

    `window`: tokens of a sliding window; if `local`, of the chunks that attention is cut into; None
    for full attention.
    """

    block_size: int
    window: int | None = None
    local: bool = False

    @classmethod
    def of(cls, spec: Any, block_size: int) -> Reach:
        """Return that of a group's KVCacheSpec.

        `block_size`: tokens per block of its tables, which several ranks may share.
        """
        if isinstance(spec, ChunkedLocalAttentionSpec):
            return cls(block_size, spec.attention_chunk_size, local=True)
        if isinstance(spec, SlidingWindowSpec):
            return cls(block_size, spec.sliding_window)
        return cls(block_size)

    def first_read(self, computed: int) -> int:
        """Return the first position that is read by the token behind `computed` tokens."""
        if self.window is None:
            return 0
        if self.local:
            return computed // self.window * self.window
        return max(0, computed - self.window + 1)

    def passed(self, computed: int) -> int:
        """Return how many leading blocks no token behind `computed` tokens reads."""
        return self.first_read(computed) // self.block_size

    def most_blocks(self, in_flight: int, longest: int) -> int | None:
        """Return how many blocks a request holds at most; None: those of all its tokens.

        `in_flight`: tokens that are scheduled at most before their steps land. `longest`: tokens of
        a request.
        """
        if self.window is None:
            return None
        read = self.window if self.local else self.window - 1
        blocks = -(-min(read + in_flight, longest) // self.block_size)
        return blocks if self.local else blocks + 1  # a window may begin inside a block
