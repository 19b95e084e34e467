# SPDX-License-Identifier: Apache-2.0
"""The engine's block hashes, set against what the harness knows about content: equal content, equal hash, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvconform.provenance import ROOT, extend


@dataclass(frozen=True)
class Stored:
    """A hashed block: the tokens of its request up to its end, where it ends, the hashes at the block ends before it, the adapter."""

    tokens: list[int]
    end: int
    parents: dict[int, Any]
    lora: str | None


class HashBook:
    """Every block hash that a request showed in this run. `block_size`: tokens per hash. `identity(req)`: salt, adapter, images."""

    def __init__(self, block_size: int, identity: Callable[[str], Any]) -> None:
        self.block_size, self.identity = block_size, identity
        self.blocks: dict[Any, Stored] = {}
        self._hash_of: dict[int, Any] = {}
        self._content_of: dict[Any, int] = {}
        self._numbers: dict[Any, int] = {}

    def numbers(self, keys: Iterable[Any]) -> list[int]:
        """Names for hashes that are the same in every process, whatever the hash seed: the order in which they were first named."""
        return [self._numbers.setdefault(key, len(self._numbers)) for key in keys]

    def keys(self, request: Any) -> list[Any]:
        """The hashes of a request's full blocks, as KV events spell them."""
        return [maybe_convert_block_hash(key) for key in request.block_hashes]

    def enter(self, request: Any) -> dict[str, Any]:
        """Take note of a request's hashes. How many there are and should be; whether they agree with content seen before."""
        keys, tokens = self.keys(request), list(request.all_token_ids)
        identity, chain, same, distinct = self.identity(request.request_id), ROOT, True, True
        parents: dict[int, Any] = {}
        lora = None if request.lora_request is None else request.lora_request.lora_name
        for position, token in enumerate(tokens):
            chain = extend(chain, token, identity.extra(position))
            end = position + 1
            if end % self.block_size or end // self.block_size > len(keys):
                continue
            key = keys[end // self.block_size - 1]
            same = same and self._hash_of.setdefault(chain, key) == key
            distinct = distinct and self._content_of.setdefault(key, chain) == chain
            if key not in self.blocks:
                self.blocks[key] = Stored(tokens, end, dict(parents), lora)
            parents[end] = key
        return {"count": len(keys), "full": len(tokens) // self.block_size, "same": same, "distinct": distinct}

    def reach(self, request: Any, announced: dict[Any, int]) -> int:
        """Tokens of a request that announced blocks cover without a gap, from the start."""
        covered = 0
        for number, key in enumerate(self.keys(request), 1):
            end = number * self.block_size
            if key in announced and end - announced[key] <= covered:
                covered = end
        return covered

    def between(self, request: Any, start: int, end: int | None = None) -> Iterator[Any]:
        """The hashes of the blocks that end within (start, end]; up to the last one without `end`."""
        for number, key in enumerate(self.keys(request), 1):
            if start < number * self.block_size and (end is None or number * self.block_size <= end):
                yield key
