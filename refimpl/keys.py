# SPDX-License-Identifier: Apache-2.0
"""Chunk keys: identify the content of a chunk of KV across processes, requests and block tables.

A key is a chained SHA-256 over fixed-size chunks of token ids. The chain starts at a root that
names the model and the number format; then come the request's tenant (cache salt) and adapter. Each
link also covers what changes the KV although the token ids are equal: multi-modal items with their
positions, and prompt embeddings. Python's `hash()` differs between processes: never use it here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

FORMAT = "kvconform-1"
"""Version of the stored bytes and of the keys: change it whenever one of them changes."""


def digest(*parts: bytes | str) -> bytes:
    """Return the SHA-256 of length-prefixed parts: `("ab", "c")` and `("a", "bc")` differ."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


def root_key(vllm_config: VllmConfig, codec: str = "raw") -> bytes:
    """Return the start of every chain.

    KV of another model, number format, sharding or codec never shares a key.
    """
    model: Any = getattr(vllm_config, "model_config", None)
    parallel = vllm_config.parallel_config
    parts = [FORMAT]
    for name in ("model", "revision", "dtype", "quantization"):
        parts.append(str(getattr(model, name, None)))
    parts.append(str(getattr(vllm_config.cache_config, "cache_dtype", None)))
    parts.append(str(parallel.world_size))
    # The tokens of a block are split over so many ranks, and the layers.
    slices = parallel.decode_context_parallel_size
    if slices > 1:
        run = getattr(parallel, "cp_kv_cache_interleave_size", 1)  # older releases have none
        parts.append(f"cp{slices} by {run}" if run > 1 else f"cp{slices}")
    stages = parallel.pipeline_parallel_size
    if stages > 1:
        parts.append(f"pp{stages}")
    overrides = getattr(model, "hf_overrides", None)
    if overrides:
        parts.append(f"overrides {overrides}")
    if codec != "raw":
        parts.append(f"codec {codec}")
    return digest(*parts)


def request_key(root: bytes, request: Request) -> bytes:
    """Return the chain's second link: the tenants that may share KV, and the adapter.

    An adapter is identified by its name *and* path; its integer id differs between processes.
    """
    lora: Any = request.lora_request
    adapter = () if lora is None else (str(lora.lora_name), str(getattr(lora, "lora_path", "")))
    return digest(root, "salt", request.cache_salt or "", "lora", *adapter)


def chunk_extras(request: Request, start: int, end: int) -> list[bytes | str]:
    """Return what changes the KV of the tokens `[start, end)` and is not in their ids.

    For example, the placeholders of all images have equal ids.
    """
    extras: list[bytes | str] = []
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        if offset < end and offset + length > start:
            extras += ["mm", str(feature.identifier), str(offset - start)]
    if request.prompt_embeds is not None and start < len(request.prompt_embeds):
        rows = request.prompt_embeds[start:end].contiguous()
        extras += ["embeds", rows.view(dtype=_bytes()).numpy().tobytes()]
    return extras


def extend_keys(
    keys: list[str], root: bytes, request: Request, chunk_tokens: int, end: int
) -> Sequence[str]:
    """Append to `keys` the missing keys of the whole chunks within `[0, end)`; return `keys`.

    `end` must not exceed the known tokens.
    """
    parent = bytes.fromhex(keys[-1]) if keys else request_key(root, request)
    for start in range(len(keys) * chunk_tokens, end - chunk_tokens + 1, chunk_tokens):
        stop = start + chunk_tokens
        tokens = array("q", request.all_token_ids[start:stop]).tobytes()
        parent = digest(parent, tokens, *chunk_extras(request, start, stop))
        keys.append(parent.hex())
    return keys


def _bytes() -> Any:
    import torch

    return torch.uint8
