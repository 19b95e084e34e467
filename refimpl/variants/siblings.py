# SPDX-License-Identifier: Apache-2.0
"""Connectors that stand beside the one under test in a MultiConnector. The suite does not record what is asked of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.request import RequestStatus

from kvconform.kv import device
from kvconform.refimpl.connector import ReferenceConnector
from kvconform.refimpl.delay import Countdown
from kvconform.refimpl.plan import Load
from kvconform.refimpl.store import open_store
from kvconform.refimpl.variants.decoy import Decoy
from kvconform.refimpl.variants.plain import Plain


class Idle(Decoy):
    """Finds nothing, stores nothing."""

    kvconform_sibling = True


class Waits:
    """Copies KV at once, as if there were no streams: first, the forward pass has to come as far as the host is."""

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


class Winner(Waits, Plain):
    """Keeps everything and, listed first, loads it."""

    kvconform_sibling = True
    _stores: ClassVar[
        dict[str, Any]
    ] = {}  # of its own: the connector under test may be a Plain too


@dataclass
class HolderMetadata(KVConnectorMetadata):
    """Requests whose blocks are held from this step on."""

    held: list[str] = field(default_factory=list)


class Holder(Decoy):
    """Keeps the blocks of every finished request for some steps, and reports them then: reports that are no sibling's business."""

    kvconform_sibling = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._held: list[str] = []
        self._sending: Countdown[str] = Countdown()

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        ended = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        holds = ended and bool(
            block_ids
        )  # the blocks of an aborted load are freed by the report of the load, and by it alone
        self._held += [request.request_id] * holds
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


class Fetcher(Waits, ReferenceConnector):
    """Hands what it has to one request, asynchronously: for some steps, the blocks that its siblings are told of hold nothing yet.

    As a transfer from another engine does, it gives everything away once, and keeps nothing of what it has fetched.
    """

    kvconform_sibling = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = replace(self.options, load="async", load_delay=2)
        self._store = open_store(f"memory:fetched by {self._kv_transfer_config.engine_id}")

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._may_save = self._may_save and not num_external_tokens

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        super()._load(load, layers)
        for piece in load.pieces:
            self._store.drop(piece.key)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Nothing: MultiConnector would give it to all children in the place of theirs."""
        return None


@dataclass
class Greeting(KVConnectorHandshakeMetadata):
    """Nothing that another connector could use."""

    words: str


class Greeter(Decoy):
    """Has handshake metadata, and MultiConnector passes the first child's on to all of them."""

    kvconform_sibling = True

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Greeting("hello") if self.role == KVConnectorRole.WORKER else None
