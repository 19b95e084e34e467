# SPDX-License-Identifier: Apache-2.0
"""What a client sends to vLLM's API server, and what the engine must get of it.

The client and the probe in the engine's process both read the job, so the probe knows what a
request was when it was sent, whatever the server made of it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kvconform.contract.scenario import MAX_MODEL_LEN
from kvconform.fixtures import tiny_blip, tiny_tokenizer
from kvconform.live.job import EMBEDDINGS, Ask, Job
from kvconform.live.state import digest

BASE = "tiny"
"""Name under which the server serves the model itself."""
WIDTH = 128
"""Elements of an embedding, the hidden size of the tiny model."""
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    EMBEDDINGS: "/v1/embeddings",
}
"""Path of the server, by entrypoint."""
_INTERNAL = {
    "completions": re.compile(r"cmpl-(.+)-0-[0-9a-f]{8}"),
    "chat": re.compile(r"chatcmpl-(.+)-[0-9a-f]{8}"),
    EMBEDDINGS: re.compile(r"embd-(.+)-0-[0-9a-f]{8}"),
}
"""Ids of requests in the engine; the group is the client's X-Request-Id."""


def name_of(lora: str) -> str:
    """Return the name by which clients ask for an adapter, without its version."""
    return lora.partition("@")[0]


def body(ask: Ask) -> dict[str, Any]:
    """Return the JSON body of the HTTP request.

    It asks for greedy tokens with their log probabilities, or for the prompt's embedding.
    """
    found: dict[str, Any] = {
        "model": BASE if ask.lora is None else name_of(ask.lora),
        "priority": ask.priority,
    }
    if ask.salt is not None:
        found["cache_salt"] = ask.salt
    if ask.entrypoint == EMBEDDINGS:
        found["input"] = ask.tokens
        return found
    found |= {
        "temperature": 0.0,
        "max_tokens": ask.out,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if ask.entrypoint == "chat":
        found["messages"] = [{"role": "user", "content": _content(ask)}]
        found["logprobs"] = True
        found["top_logprobs"] = 2
        return found
    found["logprobs"] = 2
    if ask.embeds is None:
        found["prompt"] = ask.tokens
    else:
        file = io.BytesIO()
        torch.save(embeddings(ask.embeds, len(ask.tokens)), file)
        found["prompt_embeds"] = base64.b64encode(file.getvalue()).decode()
    return found


def _content(ask: Ask) -> str | list[dict[str, Any]]:
    """Return the content of a chat message: the words, and the image in front of them."""
    text = tiny_tokenizer.text(ask.words)
    if ask.image is None:
        return text
    file = io.BytesIO()
    tiny_blip.pixels(ask.image).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]


def embeddings(content: str, count: int) -> torch.Tensor:
    """Return the first `count` rows [count, WIDTH] of a content, float32."""
    generator = torch.Generator().manual_seed(zlib.crc32(content.encode()))
    return torch.randn((MAX_MODEL_LEN, WIDTH), generator=generator)[:count].clone()


def prompt_of(tokens: Iterable[int], embeds: torch.Tensor | None) -> str:
    """Return what the model is to read, in a few characters: a hash of it, and its length."""
    if embeds is not None:
        return f"{len(embeds)} embeddings {digest(embeds.float())}"
    ids = list(tokens)
    text = hashlib.sha256(repr(ids).encode()).hexdigest()[:16]
    return f"{len(ids)} tokens {text}"


class Entries:
    """The requests of a job by the id that the client sends; none if they do not enter by HTTP."""

    def __init__(self, asks: Iterable[Ask] = ()) -> None:
        self.asks = {ask.id: ask for ask in asks if ask.entrypoint}
        # The image that was the first to have an identifier, by the identifiers of a request.
        self._images: dict[tuple[str, ...], str | None] = {}

    @classmethod
    def read(cls, path: str | None) -> Entries:
        """Read the requests of a job; no file: none."""
        if not path:
            return cls()
        return cls(ask for play in Job.read(Path(path)).plays for ask in play.asks)

    def sent(self, request_id: str) -> Ask | None:
        """Return what the client sent as the engine's request of this id; None if it is unknown."""
        for entrypoint, pattern in _INTERNAL.items():
            match = pattern.fullmatch(request_id)
            ask = self.asks.get(match.group(1)) if match is not None else None
            if ask is not None and ask.entrypoint == entrypoint:
                return ask
        return None

    def fields(self, request: Any) -> dict[str, Any] | None:
        """Return the fields of the live.entered event of a vLLM request.

        None if it is not a request of the client.
        """
        ask = self.sent(request.request_id)
        if ask is None:
            return None
        lora = request.lora_request
        embeds = request.prompt_embeds
        images = tuple(feature.identifier for feature in request.mm_features)
        prompt = list(request.all_token_ids)[: request.num_prompt_tokens]
        sent = None if ask.embeds is None else embeddings(ask.embeds, len(ask.tokens))
        return {
            "req": request.request_id,
            "sent": ask.id,
            "entrypoint": ask.entrypoint,
            "salt": request.cache_salt,
            "sent_salt": ask.salt,
            "adapter": None if lora is None else lora.lora_name,
            "sent_adapter": None if ask.lora is None else name_of(ask.lora),
            "image": self._images.setdefault(images, ask.image) if images else None,
            "sent_image": ask.image,
            "weights": None if lora is None else Path(lora.lora_path).name,
            "sent_weights": ask.lora,
            "prompt": prompt_of(prompt, embeds),
            "sent_prompt": prompt_of(ask.tokens, sent),
        }
