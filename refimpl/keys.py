# SPDX-License-Identifier: Apache-2.0
"""Chunk keys: what a chunk of KV *is*, independent of process, request and block table.

A key is a chained SHA-256 over fixed-size chunks of token ids. The chain starts at a root that names the model and the numbers'
format, then the request's tenant (cache salt) and adapter; each link adds what changes the KV although the token ids are equal:
multi-modal items with their position, prompt embeddings. Python's ``hash()`` differs between processes and must not appear here.
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
"""Change it whenever the bytes of a stored chunk or the way to its key change."""


def digest(*parts: bytes | str) -> bytes:
    """SHA-256 over length-prefixed parts: ``("ab", "c")`` and ``("a", "bc")`` differ."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


def root_key(vllm_config: VllmConfig) -> bytes:
    """The start of every chain: KV of another model, number format or sharding never shares a key."""
    model: Any = getattr(vllm_config, "model_config", None)
    names = [
        str(getattr(model, name, None)) for name in ("model", "revision", "dtype", "quantization")
    ]
    cache_dtype = str(getattr(vllm_config.cache_config, "cache_dtype", None))
    slices = vllm_config.parallel_config.decode_context_parallel_size  # of the tokens of a block
    return digest(
        FORMAT,
        *names,
        cache_dtype,
        str(vllm_config.parallel_config.world_size),
        *([f"cp{slices}"] if slices > 1 else []),
    )


def request_key(root: bytes, request: Request) -> bytes:
    """The chain's second link: who may share (salt) and with which weights (LoRA name *and* path; its integer id is per process)."""
    lora: Any = request.lora_request
    adapter = () if lora is None else (str(lora.lora_name), str(getattr(lora, "lora_path", "")))
    return digest(root, "salt", request.cache_salt or "", "lora", *adapter)


def chunk_extras(request: Request, start: int, end: int) -> list[bytes | str]:
    """What changes the KV of tokens ``[start, end)`` and is not in their ids. Image placeholders, for one, have equal ids for all
    images."""
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
    """Append the keys of the full chunks within ``[0, end)`` that ``keys`` lacks; returns ``keys``. ``end`` must not exceed the
    known tokens."""
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
