# SPDX-License-Identifier: Apache-2.0
"""Connectors that share a MultiConnector with the connector under test.

The suite does not record their calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvconform.compat.vllm_api import SupportsHMA
from kvconform.kv import device
from kvconform.refimpl.cache.chunks import open_store
from kvconform.refimpl.connector import Finish, ReferenceConnector
from kvconform.refimpl.delay import Countdown
from kvconform.refimpl.plan import Load
from kvconform.refimpl.variants.decoy import Decoy
from kvconform.refimpl.variants.plain import Plain


class _AnyGroups(Decoy, SupportsHMA):
    """A sibling that touches no KV, so that several KV cache groups are as good as one.

    MultiConnector supports several groups if all of its children do.
    """

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [block for group in block_ids for block in group])


class Idle(_AnyGroups):
    """A sibling that finds nothing and stores nothing."""

    kvconform_sibling = True


class Waits:
    """A mixin for connectors that copy KV synchronously.

    The device must first do all work that the host has queued, such as the forward pass.
    """

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        device.current.finish()
        super().start_load_kv(*args, **kwargs)  # type: ignore[misc]

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        device.current.finish()
        super().save_kv_layer(*args, **kwargs)  # type: ignore[misc]

    def wait_for_save(self) -> None:
        device.current.finish()
        super().wait_for_save()  # type: ignore[misc]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        device.current.finish()
        found: Any = super().get_finished(finished_req_ids)  # type: ignore[misc]
        return found


class Forgets:
    """A mixin for connectors that store: they forget all when a load fails, be it a sibling's.

    They saved what it was to bring, and what was computed upon it until the engine heard of it.
    """

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)  # type: ignore[misc]
        if connector_output.invalid_block_ids:
            self.reset_cache()  # type: ignore[attr-defined]


class Winner(Waits, Forgets, Plain):
    """Stores everything and, as it is listed first, loads it."""

    kvconform_sibling = True
    # Not shared with Plain: the connector under test may be one too.
    _stores: ClassVar[dict[str, Any]] = {}


@dataclass
class HolderMetadata(KVConnectorMetadata):
    """Requests whose blocks are held from this step on."""

    held: list[str] = field(default_factory=list)


class Holder(_AnyGroups):
    """Holds the blocks of every finished request for some steps, and then reports them.

    The reports must not reach its siblings.
    """

    kvconform_sibling = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._held: list[str] = []
        self._sending: Countdown[str] = Countdown()

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        ended = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        # The blocks of an aborted load are freed by the report of the load, not by this one.
        holds = ended and bool(block_ids)
        if holds:
            self._held.append(request.request_id)
        return holds, None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        held, self._held = self._held, []
        return HolderMetadata(held)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, HolderMetadata)
        for req in metadata.held:
            self._sending.add(req, 2)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return set(self._sending.poll()) or None, None


class Fetcher(Waits, Forgets, ReferenceConnector):
    """Loads asynchronously, so its siblings see blocks that hold no KV yet for some steps.

    Like a transfer from another engine, it delivers KV only once, and does not keep what it has
    loaded.
    """

    kvconform_sibling = True
    medium = "ELSEWHERE"

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = replace(self.options, load="async", load_delay=2)
        self._store = open_store(f"memory:fetched by {self._kv_transfer_config.engine_id}")
        self._fetched: set[str] = set()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._fetched.add(request.request_id)

    def _worth_saving(self, request: Any, end: int) -> int:
        return 0 if request.request_id in self._fetched else super()._worth_saving(request, end)

    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        found = super().request_finished(request, block_ids)
        self._fetched.discard(request.request_id)
        return found

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        super()._load(load, layers)
        for piece in load.pieces:
            self._store.drop(piece.key)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return None: MultiConnector would pass it on to all children instead of their own."""
        return None

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> Any:
        """Return None: a process can register the metrics of this class's base only once."""
        return None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return None: nothing would show them."""
        return None


class Failer(Fetcher):
    """Loads asynchronously, and each load fails: the engine computes what it was to bring.

    MultiConnector tells the scheduler halves of all children which blocks did not arrive.
    """

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        for piece in load.pieces:
            self._store.drop(piece.key)
        super()._load(load, layers)


@dataclass
class Greeting(KVConnectorHandshakeMetadata):
    """Handshake metadata that no other connector can use."""

    words: str


class Greeter(_AnyGroups):
    """Has handshake metadata: MultiConnector passes that of the first child on to all children."""

    kvconform_sibling = True

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self.role != KVConnectorRole.WORKER:
            return None
        return Greeting("hello")
