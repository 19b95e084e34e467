# SPDX-License-Identifier: Apache-2.0
"""Planted defects: keys that are equal although the KV differs, and keys that are never found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvconform.refimpl.connector import Finish, ReferenceConnector
from kvconform.refimpl.keys import chunk_extras, digest, extend_keys, request_key
from kvconform.refimpl.plan import Piece, Save
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class KeysEmbeddingsAlone(ReferenceConnector):
    """Keys a prompt of embeddings by these, without salt and adapter."""

    def _keys(self, request: Request, keys: list[str], end: int) -> Sequence[str]:
        if request.prompt_embeds is None or keys:
            return super()._keys(request, keys, end)
        plain = SimpleNamespace(
            cache_salt=None,
            lora_request=None,
            prompt_embeds=request.prompt_embeds,
            mm_features=request.mm_features,
            all_token_ids=request.all_token_ids,
        )
        return super()._keys(plain, keys, end)  # type: ignore[arg-type]


class _PartialIdentity(ReferenceConnector):
    """Builds keys from a request with some attributes replaced, those of `_identity`."""

    def _identity(self, request: Request) -> dict[str, Any]:
        raise NotImplementedError

    def _keys(self, request: Request, keys: list[str], end: int) -> Sequence[str]:
        names = ("all_token_ids", "cache_salt", "lora_request", "mm_features", "prompt_embeds")
        seen: Any = SimpleNamespace(
            **{name: getattr(request, name) for name in names} | self._identity(request)
        )
        return extend_keys(keys, self._root, seen, self.options.chunk_tokens, end)


class SaltNamesAFolder(ReferenceConnector):
    """Looks for a tenant's KV in a folder named by the salt, which may be too long for a name."""

    def _stored_prefix(self, request: Request) -> int:
        with suppress(FileNotFoundError):
            os.stat(os.path.join(os.getcwd(), request.cache_salt or "all"))
        return super()._stored_prefix(request)


class NoSalt(_PartialIdentity):
    """Omits the cache salt from the key: one tenant's KV is served to another (B076)."""

    def _identity(self, request: Request) -> dict[str, Any]:
        return {"cache_salt": None}


class KeepsTheFirstSalt(_PartialIdentity):
    """Notes the salt of a request id once, and forgets it with the blocks of the request.

    A request that never gets blocks leaves its salt to the next one with its id.
    """

    def _identity(self, request: Request) -> dict[str, Any]:
        salts: dict[str, str | None] = self.__dict__.setdefault("_salts", {})
        return {"cache_salt": salts.setdefault(request.request_id, request.cache_salt)}

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        answer = super().request_finished(request, block_ids)
        if block_ids:
            self.__dict__.get("_salts", {}).pop(request.request_id, None)
        return answer


class JoinsNames(_PartialIdentity):
    """Joins salt and adapter in the key without their lengths (B082)."""

    def _identity(self, request: Request) -> dict[str, Any]:
        adapter = request.lora_request.lora_name if request.lora_request else ""
        return {"cache_salt": (request.cache_salt or "") + adapter, "lora_request": None}


class NoAdapter(_PartialIdentity):
    """Omits the LoRA adapter from the key: KV of one adapter is served to another (B080)."""

    def _identity(self, request: Request) -> dict[str, Any]:
        return {"lora_request": None}


class NoImages(_PartialIdentity):
    """Omits images from the key: prompts that differ only in an image share KV (B077)."""

    def _identity(self, request: Request) -> dict[str, Any]:
        return {"mm_features": []}


class KeepsTheFirstImages(_PartialIdentity):
    """Notes the images of a request when it is first seen, as if a session were given no more."""

    def _identity(self, request: Request) -> dict[str, Any]:
        images: dict[str, list[Any]] = self.__dict__.setdefault("_images", {})
        return {"mm_features": images.setdefault(request.request_id, list(request.mm_features))}

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        self.__dict__.get("_images", {}).pop(request.request_id, None)
        return super().request_finished(request, block_ids)


class ImagesAnywhere(_PartialIdentity):
    """Puts into the key which images a chunk shows, but not where (B079)."""

    def _identity(self, request: Request) -> dict[str, Any]:
        size = self.options.chunk_tokens
        positions = [feature.mm_position for feature in request.mm_features]
        covers = [range(p.offset // size, (p.offset + p.length - 1) // size + 1) for p in positions]
        return {
            "mm_features": [
                SimpleNamespace(
                    identifier=feature.identifier,
                    mm_position=SimpleNamespace(offset=chunk * size, length=size),
                )
                for feature, chunks in zip(request.mm_features, covers, strict=True)
                for chunk in chunks
            ]
        }


class AnyModel(ReferenceConnector):
    """Leaves the model out of its keys."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._root = self._root_of(vllm_config)

    def _root_of(self, vllm_config: VllmConfig) -> bytes:
        parallel = vllm_config.parallel_config
        degrees = (parallel.world_size, parallel.decode_context_parallel_size)
        return digest(self._name_of(str(vllm_config.model_config.model)), str(degrees))

    def _name_of(self, model: str) -> str:
        return ""


class AnyWeights(AnyModel):
    """Takes only the model's name into its keys: no revision, quantization or override."""

    def _name_of(self, model: str) -> str:
        return model


class ModelWithoutOwner(AnyModel):
    """Takes the last part of the model's name into its keys."""

    def _name_of(self, model: str) -> str:
        return model.rsplit("/", 1)[-1]


class Unchained(ReferenceConnector):
    """Makes a chunk's key of its own tokens only, so that it is found behind any prefix."""

    def _keys(self, request: Request, keys: list[str], end: int) -> Sequence[str]:
        size = self.options.chunk_tokens
        for start in range(len(keys) * size, end - size + 1, size):
            keys.append(digest(self._root, *self._parts(request, start, start + size)).hex())
        return keys

    def _parts(self, request: Request, start: int, stop: int) -> list[bytes | str]:
        """Return what the key of the chunk `[start, stop)` is made of."""
        return [str(list(request.all_token_ids[start:stop]))]


class UnchainedWithIdentity(Unchained):
    """Makes a chunk's key of its own tokens and the request's identity, not of what is before it.

    The oldest bug of prefix caches.
    """

    def _parts(self, request: Request, start: int, stop: int) -> list[bytes | str]:
        identity = [request_key(self._root, request), *chunk_extras(request, start, stop)]
        return [*super()._parts(request, start, stop), *identity]


class UnchainedAtPlace(UnchainedWithIdentity):
    """Makes a chunk's key of its own tokens, its place and the request's identity."""

    def _parts(self, request: Request, start: int, stop: int) -> list[bytes | str]:
        return [str(start), *super()._parts(request, start, stop)]


class _ShortImages(_PartialIdentity):
    """Puts part of an image's identifier into the key."""

    def _identity(self, request: Request) -> dict[str, Any]:
        return {
            "mm_features": [
                SimpleNamespace(
                    identifier=self._shortened(feature.identifier),
                    mm_position=feature.mm_position,
                )
                for feature in request.mm_features
            ]
        }

    def _shortened(self, identifier: str) -> str:
        raise NotImplementedError


class ImagesByStart(_ShortImages):
    """Puts the first 64 bits of an image's identifier into the key."""

    def _shortened(self, identifier: str) -> str:
        return identifier[:16]


class ImagesByEnd(_ShortImages):
    """Puts the last 64 bits of an image's identifier into the key."""

    def _shortened(self, identifier: str) -> str:
        return identifier[-16:]


class AdapterByName(_PartialIdentity):
    """Puts an adapter's name into the key, and not its path."""

    def _identity(self, request: Request) -> dict[str, Any]:
        lora = request.lora_request
        return {"lora_request": lora and SimpleNamespace(lora_name=lora.lora_name, lora_path="")}


class NoEmbeddings(_PartialIdentity):
    """Omits prompt embeddings from the key; the token ids of such prompts are all zero."""

    def _identity(self, request: Request) -> dict[str, Any]:
        return {"prompt_embeds": None}


class NoLastEmbedding(_PartialIdentity):
    """Leaves the last row of every chunk of embeddings out of the key."""

    def _identity(self, request: Request) -> dict[str, Any]:
        if request.prompt_embeds is None:
            return {}
        rows = request.prompt_embeds.clone()
        rows[self.options.chunk_tokens - 1 :: self.options.chunk_tokens] = 0
        return {"prompt_embeds": rows}


class ProcessHash(ReferenceConnector):
    """Makes keys with hash(), which differs between processes (B087)."""

    def _keys(self, request: Request, keys: list[str], end: int) -> Sequence[str]:
        sound = extend_keys([], self._root, request, self.options.chunk_tokens, end)
        keys[:] = [f"{hash(key) % 2**64:x}" for key in sound]
        return keys


class SaveKeyDiffers(ReferenceConnector):
    """Looks up a chunk under another key than the stored one (B038, B089)."""

    def _stored_prefix(self, request: Request) -> int:
        found = super()._stored_prefix(request)
        return 0 if request.num_tokens % self._block_size == 1 else found


class TwoDigests(ReferenceConnector):
    """Makes one key of several blocks in two ways: the lookup of text, the save of bytes (B150).

    A chunk of one block has the same key in both.
    """

    def _stored_prefix(self, request: Request) -> int:
        return super()._stored_prefix(request) if self._is_one_block() else 0

    def _is_one_block(self) -> bool:
        return self.options.chunk_tokens == self._block_size


class KeysById(ReferenceConnector):
    """Computes the keys of a request once, and caches them by its id (B012)."""

    def _pieces(self, tracked: Tracked, start: int, end: int) -> tuple[Piece, ...]:
        tracked.keys = self.__dict__.setdefault("_keys_of", {}).setdefault(
            tracked.request.request_id, tracked.keys
        )
        return super()._pieces(tracked, start, end)


class RemembersTheAborted(ReferenceConnector):
    """Forgets the keys of a request when it finishes, but not when it is aborted (B012).

    The next request with that id then gets them.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._keys_of: dict[str, list[str]] = {}

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        keys = self._keys_of.setdefault(
            request.request_id, list(self._keys(request, [], request.num_prompt_tokens))
        )
        self._tracked[request.request_id].keys = list(keys)

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        result = super().request_finished(request, block_ids)
        if request.status != RequestStatus.FINISHED_ABORTED:
            self._keys_of.pop(request.request_id, None)
        return result


class UnseenProcessHash(ProcessHash):
    """Makes keys with hash(), and does not show its plans to the suite (B087)."""

    def kvconform_inspector(self) -> Any:
        return None


class SixteenBits(_PartialIdentity):
    """Packs token ids into 16 bits, which hold fewer than a vocabulary has."""

    def _identity(self, request: Request) -> dict[str, Any]:
        return {"all_token_ids": [token & 0xFFFF for token in request.all_token_ids]}


class FirstImageOnly(_PartialIdentity):
    """Puts the first image of a chunk into its key, and no other one that begins there."""

    def _identity(self, request: Request) -> dict[str, Any]:
        firsts: dict[int, Any] = {}
        for feature in request.mm_features:
            firsts.setdefault(feature.mm_position.offset // self.options.chunk_tokens, feature)
        return {"mm_features": list(firsts.values())}


class _KeysOfSaves(ReferenceConnector):
    """Builds the keys of some saves, those that `_is_bare` names, from token ids alone."""

    _makes_bare_keys = False

    def _is_bare(self, request: Request) -> bool:
        raise NotImplementedError

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        if not self._is_bare(tracked.request):
            return super()._plan_save(tracked, end, scheduled, final)
        whole, tracked.keys = tracked.keys, []
        self._makes_bare_keys = True
        try:
            return super()._plan_save(tracked, end, scheduled, final)
        finally:
            self._makes_bare_keys = False
            tracked.keys = whole

    def _keys(self, request: Request, keys: list[str], end: int) -> Sequence[str]:
        if not self._makes_bare_keys:
            return super()._keys(request, keys, end)
        bare: Any = SimpleNamespace(
            all_token_ids=request.all_token_ids,
            cache_salt=None,
            lora_request=None,
            mm_features=(),
            prompt_embeds=None,
        )
        return extend_keys(keys, self._root, bare, self.options.chunk_tokens, end)


class ForgetsWhoResumes(_KeysOfSaves):
    """Knows the identity of new requests only: the output lists a resumed one without it."""

    def _is_bare(self, request: Request) -> bool:
        return request.num_preemptions > 0


class ForgetsImagesLater(_KeysOfSaves):
    """Knows the images of new requests only: the output lists a later chunk without them."""

    def _is_bare(self, request: Request) -> bool:
        return bool(request.mm_features) and request.num_computed_tokens > 0


class EmbeddingsOnly(_PartialIdentity):
    """Takes a prompt that has embeddings for one without token ids, which vLLM mixes in a chat."""

    def _identity(self, request: Request) -> dict[str, Any]:
        if request.prompt_embeds is None:
            return {}
        outputs = request.all_token_ids[request.num_prompt_tokens :]
        return {"all_token_ids": [0] * request.num_prompt_tokens + list(outputs)}
