# SPDX-License-Identifier: Apache-2.0
"""A connector that loads KV which was computed in another context (systems.md C8)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.keys import chunk_extras, digest, extend_keys, request_key
from kvconform.refimpl.options import Options
from kvconform.refimpl.packing import Keys, instructions_of
from kvconform.refimpl.plan import Piece, Save

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvconform.refimpl.tracking import Tracked

CONTEXT = "context"
"""Name under which a chunk's context is stored, next to its layers."""
SHARE = 0.15
DEVIATION = 1.0
"""Tolerance for reused KV in the layers behind the first, on the tiny model of engine `live`.

The texts of `live.blended` deviate by up to 0.86; KV of other tokens would by about 1.4.
"""


@dataclass(frozen=True)
class BlendOptions(Options):
    """The options of a connector that blends."""

    recompute: float = SHARE
    """The part of the tokens behind reused chunks that the engine computes again."""
    neox: bool = True
    """Whether the model's rotary embedding is NeoX-style, or else GPT-J-style."""


class Context(NamedTuple):
    """Where a chunk was computed: its first position, and the chained key of its tokens."""

    position: int
    chained: str

    def encode(self) -> bytes:
        return f"{self.position} {self.chained}".encode()

    @classmethod
    def decode(cls, stored: bytes) -> Context:
        """Undo `encode`. ValueError for anything else."""
        position, chained = stored.decode().split(" ")
        return cls(int(position), chained)


@dataclass(frozen=True)
class PlacedPiece(Piece):
    """A piece that knows where its chunk is in the request."""

    context: Context


class Blending(ReferenceConnector):
    """Finds a chunk at any position after any prefix: its key covers only its own tokens.

    This is CacheBlend for a connector that cannot compute: the tokens to compute again are the last
    ones, which it does not claim. Keys are turned to their new positions (rotary embeddings).
    Those of a quantised cache are not, so a chunk is found there after its own prefix only. Latent
    KV (MLA) is refused. Its additional options are those of `BlendOptions`.
    """

    options: BlendOptions
    options_kind = BlendOptions

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.model_config.use_mla:
            raise ValueError("blending does not turn latent KV (MLA) to other positions")
        self._rotary = Rotary.of(vllm_config, neox=self.options.neox)
        self._is_quantised = vllm_config.cache_config.cache_dtype.startswith("fp8")

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {
            **super().kvconform_capabilities(extra_config),
            "non_prefix_reuse": DEVIATION,
            "recomputes": extra_config.get("recompute", SHARE),
            "kv_events": False,
            # It loads less of a prompt whose chunks were computed in another context.
            "best_effort": True,
        }

    # -- Scheduler half

    def _keys(self, request: Request, keys: list[str], end: int) -> Sequence[str]:
        """Append the keys of the whole chunks within [0, end).

        They still cover tenant, adapter and all images up to the end of the chunk, and where its
        own images are in it: a chunk within an image may be found at the image's beginning.
        """
        if self._is_quantised:
            return super()._keys(request, keys, end)
        chunk = self.options.chunk_tokens
        for start in range(len(keys) * chunk, end - chunk + 1, chunk):
            tokens = array("q", request.all_token_ids[start : start + chunk])
            keys.append(digest(*self._parts(request, tokens, start)).hex())
        return keys

    def _parts(self, request: Request, tokens: array[int], start: int) -> Sequence[bytes | str]:
        """Return what the key of a chunk, which has these tokens and begins at `start`, covers."""
        before = chunk_extras(request, 0, start)
        inside = chunk_extras(request, start, start + len(tokens))
        return request_key(self._root, request), *before, tokens.tobytes(), *inside

    def _claim(self, request: Request, found: int) -> int:
        """Leave the declared part of the tokens behind the first reused chunk to the engine."""
        first = self._first_reused(request, found)
        if first is None:
            return super()._claim(request, found)
        again = ceil(self.options.recompute * (request.num_tokens - first))
        return super()._claim(request, min(found, request.num_tokens - again))

    def _first_reused(self, request: Request, found: int) -> int | None:
        """Return the position of the first stored chunk that was computed in another context."""
        for number, key in enumerate(self._keys(request, [], found)):
            if self._context(key) != self._own_context(request, number):
                return number * self.options.chunk_tokens
        return None

    def _own_context(self, request: Request, number: int) -> Context:
        """Return the context of a request's chunk if the chunk is computed there."""
        chunk = self.options.chunk_tokens
        end = (number + 1) * chunk
        return Context(end - chunk, extend_keys([], self._root, request, chunk, end)[number])

    def _context(self, key: str) -> Context | None:
        """Return where a stored chunk was computed; None if it is gone.

        The other half may have stored it again since this one has read it.
        """
        stored = self._store.read_many([key])[0].get(CONTEXT)
        return None if stored is None else Context.decode(stored)

    def _pieces(self, tracked: Tracked, start: int, end: int) -> tuple[Piece, ...]:
        placed = []
        for piece in super()._pieces(tracked, start, end):
            context = self._own_context(tracked.request, start // self.options.chunk_tokens)
            values = {field.name: getattr(piece, field.name) for field in fields(Piece)}
            placed.append(PlacedPiece(**values, context=context))
            start += len(piece.slots)
        return tuple(placed)

    # -- Worker half

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        """Put the context with every layer: another request's equal chunk may be elsewhere."""
        super()._save_layer(epoch, save, layer, kv_layer)
        if self._is_sound(save):
            for piece in save.pieces:
                assert isinstance(piece, PlacedPiece)
                self._store.put(epoch, piece.key, CONTEXT, piece.context.encode())

    def _load_layer(self, piece: Piece, layer: str) -> bool:
        assert isinstance(piece, PlacedPiece)
        computed = self._context(piece.key)
        if computed is None or not super()._load_layer(piece, layer):
            return False
        self._turn(layer, piece.slots, piece.context.position - computed.position)
        return True

    def _turn(self, layer: str, slots: Sequence[int], by: int) -> None:
        """Move the keys in these slots by so many positions."""
        if not by:
            return
        keys = Keys(self._layers[layer], instructions_of(self._vllm_config, layer))
        size = keys.block_size
        for block, of_block in groupby(slots, key=lambda slot: slot // size):
            offsets = [slot % size for slot in of_block]
            found = keys.read(block)
            found[offsets] = self._rotary.turned(found[offsets], by)
            keys.write(block, found)


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a model: what a position does to a key.

    `part`: which part of a head's values is turned, the first ones. `neox`: a value of the first
    half is turned together with one of the second; otherwise (GPT-J), neighbours are.
    """

    base: float
    part: float
    neox: bool

    @classmethod
    def of(cls, vllm_config: Any, *, neox: bool) -> Rotary:
        """Return a model's. ValueError if it is scaled, so that a difference does not suffice.

        The configuration of a model does not say whether it is NeoX-style: vLLM's model classes do.
        """
        config = vllm_config.model_config.hf_text_config
        parameters: dict[str, Any] = (
            getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        )
        scaling = parameters.get("rope_type") or "default"
        if scaling != "default":
            raise ValueError(f"keys with a rotary embedding of type {scaling!r} are not turned")
        base: Any = parameters.get("rope_theta") or getattr(config, "rope_theta", 10_000.0)
        part: Any = parameters.get("partial_rotary_factor") or getattr(
            config, "partial_rotary_factor", 1.0
        )
        return cls(float(base), float(part), neox)

    def turned(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        """Return keys [..., head size] moved by `by` positions."""
        size = int(keys.shape[-1] * self.part)
        part = keys[..., :size].to(torch.float32)
        half = size // 2
        angles = by * self.base ** (-torch.arange(half, device=keys.device) / half)
        cos, sin = angles.cos(), angles.sin()
        first, second = part.chunk(2, dim=-1) if self.neox else (part[..., ::2], part[..., 1::2])
        pair = first * cos - second * sin, second * cos + first * sin
        moved = torch.cat(pair, dim=-1) if self.neox else torch.stack(pair, dim=-1).flatten(-2)
        return torch.cat([moved.to(keys.dtype), keys[..., size:]], dim=-1)
