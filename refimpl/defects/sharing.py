# SPDX-License-Identifier: Apache-2.0
"""Planted defects: engines that share what they store, and do not find it, or find too much."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, takewhile
from typing import Any

from kvconform.refimpl.cache.backend import Backend
from kvconform.refimpl.cache.peers import Neighbours
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.defects.outage import TrustsServer
from kvconform.refimpl.keys import digest
from kvconform.refimpl.variants.neighbours import PeerToPeer


class _First(Neighbours):
    def peers(self) -> Iterator[Backend]:
        yield from islice(super().peers(), 1)


class AsksOnePeer(PeerToPeer):
    """Asks the first of the other engines, and no further one."""

    backend_kind = _First


class _Remembers(Neighbours):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._index: dict[str, bool] = {}

    def exists(self, key: str) -> bool:
        if self._own.exists(key):
            return True
        return self._index.setdefault(key, super().exists(key))


class RemembersPeers(PeerToPeer):
    """Asks other engines once for a chunk, and trusts that answer from then on."""

    backend_kind = _Remembers


class RemembersStore(TrustsServer):
    """Looks a chunk up until it is found, and trusts that until its own cache is reset."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._found: set[str] = set()

    def _stored_prefix(self, request: Any) -> int:
        keys = self._keys(request, [], request.num_tokens)
        present = takewhile(lambda key: key in self._found or self._store.has(key), keys)
        found = list(present)
        self._found.update(found)
        return len(found) * self.options.chunk_tokens

    def reset_cache(self) -> bool | None:
        self._found.clear()
        return super().reset_cache()


class KeysByEngine(ReferenceConnector):
    """Has the id of the engine in its keys."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._root = digest(self._root, str(self._kv_transfer_config.engine_id))
