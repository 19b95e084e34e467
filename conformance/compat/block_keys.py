# SPDX-License-Identifier: Apache-2.0
"""The extra keys of blocks: what their hashes depend on besides tokens, as KV events publish it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.v1.core import kv_cache_utils

ExtraKeys = Callable[[int, int], tuple[Any, ...] | None]
"""Returns the extra keys of the block with the tokens [start, end)."""
_FACTS = ("mm_features", "lora_request", "cache_salt", "prompt_embeds")
_published = getattr(kv_cache_utils, "to_event_extra_keys", list)
"""Removes the tags from the keys of blocks; in older releases they have none."""


def extra_keys_of(request: Any) -> ExtraKeys:
    """Return the extra keys of a request's blocks. Keeps no reference to the request."""
    facts: Any = SimpleNamespace(
        **{name: getattr(request, name, None) for name in _FACTS},
        _prompt_embeds_per_block_hashes={},
    )

    def keys(start: int, end: int) -> tuple[Any, ...] | None:
        found, _ = kv_cache_utils.generate_block_hash_extra_keys(facts, start, end, 0)
        return None if found is None else tuple(_published([found])[0])

    return keys
