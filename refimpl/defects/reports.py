# SPDX-License-Identifier: Apache-2.0
"""Completion reports: exactly once, and only for what the engine waits for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvconform.refimpl.connector import ReferenceConnector

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.request import Request

Finished = tuple[set[str] | None, set[str] | None]


class ReceivedTwice(ReferenceConnector):
    """Reports a finished load in two steps."""

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        sent, received = super().get_finished(finished_req_ids)
        again: set[str] = self.__dict__.get("_again", set())
        self._again = received or set()
        return sent, (self._again | again) or None


class ReceivedEarly(ReferenceConnector):
    """Reports an asynchronous load as finished as soon as it was submitted: requests go on with what was in the blocks before."""

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        sent, _ = super().get_finished(finished_req_ids)
        return sent, {load.req for load in self._metadata().loads if load.is_async} or None


class ReceivedSync(ReferenceConnector):
    """Reports synchronous loads as finished, for which nobody waits."""

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        sent, received = super().get_finished(finished_req_ids)
        return sent, (received or set()) | {
            load.req for load in self._metadata().loads if not load.is_async
        }


class SentUnheld(ReferenceConnector):
    """Reports every finished request as sent, also those whose blocks it did not keep (B050)."""

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        sent, received = super().get_finished(finished_req_ids)
        return (sent or set()) | finished_req_ids, received


class NeverSent(ReferenceConnector):
    """Keeps the blocks of finished requests and never gives them back."""

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        return None, super().get_finished(finished_req_ids)[1]


class HoldsAborted(ReferenceConnector):
    """Keeps the blocks of an aborted request too, but has nothing to send for it and so never reports it (B058)."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        loading = request.request_id in self._loading
        holds, params = super().request_finished(request, block_ids)
        return holds or (bool(block_ids) and not loading), params


class ForgetsAbortedLoad(ReferenceConnector):
    """Cancels the load of an aborted request without reporting it: its blocks are never freed (B049)."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._dropped.add(request.request_id)
        return super().request_finished(request, block_ids)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        super().handle_preemptions(kv_connector_metadata)
        self._load_queue.drop(lambda load: load.req in kv_connector_metadata.dropped)  # type: ignore[attr-defined]


class ReportsBoth(ReferenceConnector):
    """Keeps the blocks of a request that is aborted while it loads, and reports both the load and the release (B050)."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        loading = request.request_id in self._loading
        holds, params = super().request_finished(request, block_ids)
        return holds or loading, params

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        sent, received = super().get_finished(finished_req_ids)
        aborted: set[str] = self.__dict__.setdefault("_aborted", set())
        aborted |= finished_req_ids
        return (sent or set()) | ((received or set()) & aborted), received


class Blocks(ReferenceConnector):
    """Waits in get_finished until the transfers under way are over, while every other request waits with it."""

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        while len(self._load_queue):
            time.sleep(1.0)
        return super().get_finished(finished_req_ids)
