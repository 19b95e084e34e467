# SPDX-License-Identifier: Apache-2.0
"""A connector over tiers with a controller (systems.md C6; `refimpl/cache/controller.py`).

An operator addresses stored KV by a request with the same content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvconform.refimpl.cache.codecs import CODECS, Codec, Compressible
from kvconform.refimpl.cache.controller import Controller
from kvconform.refimpl.keys import root_key
from kvconform.refimpl.variants.tiers import Tiered

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

OPERATIONS = ["lookup", "clear", "move", "pin", "compress"]


class Controlled(Tiered):
    """The connector over tiers, whose chunks can be compressed later."""

    controller_kind: ClassVar[type[Controller]] = Controller
    smaller: ClassVar[Codec] = CODECS["int8"]
    """The form of compressed chunks."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._codec = Compressible()
        self._root = root_key(vllm_config, "compressible")
        self._controller = self.controller_kind(self._cache.tiers, self._cache.holds, self.smaller)

    def shutdown(self) -> None:
        self._controller.unpin_all()
        super().shutdown()

    # -- Suite

    def kvconform_controller(self) -> RequestController:
        """Return the controller. Scheduler half."""
        return RequestController(self, self._controller)

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {**super().kvconform_capabilities(extra_config), "controller": OPERATIONS}


class RequestController:
    """The controller, for the content of requests that the engine may not know."""

    def __init__(self, connector: Controlled, controller: Controller) -> None:
        self._connector = connector
        self._controller = controller

    def _chunks(self, request: Request) -> list[list[str]]:
        keys = self._connector._keys(request, [], request.num_tokens)
        return [self._connector._store.names(key) for key in keys]

    def lookup(self, request: Request) -> dict[str, Any]:
        """Return how many of the first tokens are there (`found`), and how many where (`at`)."""
        chunks = self._chunks(request)
        tokens = self._connector.options.chunk_tokens
        found = self._controller.found(chunks)
        at = self._controller.at(chunks)
        return {
            "found": found * tokens,
            "at": {level: count * tokens for level, count in at.items()},
        }

    def clear(self, request: Request) -> None:
        """Forget the content."""
        self._controller.clear(self._chunks(request))

    def move(self, request: Request, level: str) -> None:
        """Move the content to a level."""
        self._controller.move(self._chunks(request), level)

    def pin(self, request: Request) -> None:
        """Keep the content from eviction until it is unpinned."""
        self._controller.pin(self._chunks(request))

    def unpin(self, request: Request) -> None:
        """Undo `pin`."""
        self._controller.unpin(self._chunks(request))

    def compress(self, request: Request) -> float:
        """Compress the content; return the tolerance of what will be loaded of it."""
        self._controller.compress(self._chunks(request))
        return self._connector.smaller.tolerance
