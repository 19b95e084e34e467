# SPDX-License-Identifier: Apache-2.0
"""Planted faults of vLLM's API server: what a client asks for is lost before the engine has it."""

from __future__ import annotations

from typing import Any

from kvconform.refimpl.faulty import Target

SERVING = "vllm.entrypoints.openai"
PROCESS_INPUTS = Target("vllm.v1.engine.input_processor:InputProcessor.process_inputs")
GET_ADAPTERS = Target("vllm.entrypoints.serve.engine.serving:BaseServing._maybe_get_adapters")
RENDER_CHAT = Target(f"{SERVING}.chat_completion.serving:OpenAIServingChat.render_chat_request")
POOL = Target("vllm.entrypoints.pooling.base.serving:PoolingBaseServing._init_ctx")
LOAD_EMBEDS = Target("vllm.renderers.base:BaseRenderer._process_embeds")
HASH_IMAGE = Target("vllm.multimodal.hasher:MultiModalHasher.hash_kwargs")
_first_paths: dict[str, str] = {}


@PROCESS_INPUTS.after
def drops_salt(request: Any, *args: Any, **kwargs: Any) -> None:
    """Drop the cache salt of every request between the HTTP request and the engine."""
    request.cache_salt = None


@RENDER_CHAT.replaced_by
async def drops_chat_salt(render: Any, *args: Any, **kwargs: Any) -> Any:
    """Drop the cache salt of chat completions."""
    found = await render(*args, **kwargs)
    if isinstance(found, tuple):
        for engine_input in found[1]:
            engine_input.pop("cache_salt", None)
    return found


@POOL.replaced_by
async def drops_embedding_salt(begin: Any, *args: Any, **kwargs: Any) -> Any:
    """Drop the cache salt of requests for embeddings."""
    found = await begin(*args, **kwargs)
    found.prompt_extras.pop("cache_salt", None)
    return found


@GET_ADAPTERS.replaced_by
def serves_base_model(resolve: Any, *args: Any, **kwargs: Any) -> None:
    """Serve requests for an adapter with the model itself."""
    resolve(*args, **kwargs)


@GET_ADAPTERS.replaced_by
def keeps_first_path(resolve: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the path of an adapter's first version when another is loaded in its place."""
    import msgspec

    found = resolve(*args, **kwargs)
    if found is None:
        return None
    path = _first_paths.setdefault(found.lora_name, found.lora_path)
    return msgspec.structs.replace(found, lora_path=path)


@LOAD_EMBEDS.after
def rounds_embeddings(found: Any, *args: Any, **kwargs: Any) -> None:
    """Round the embeddings of a prompt to bfloat16."""
    import torch

    embeds = found["prompt_embeds"]
    found["prompt_embeds"] = embeds.to(torch.bfloat16).to(embeds.dtype)


@HASH_IMAGE.replaced_by
def takes_images_for_one(hashed: Any, *args: Any, **kwargs: Any) -> str:
    """Give every image of a model the same identifier."""
    kwargs.pop("image", None)
    return str(hashed(*args, **kwargs))
