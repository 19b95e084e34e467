# SPDX-License-Identifier: Apache-2.0
"""Planted defects: connectors that report finished transfers twice, too early, wrongly or never."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvconform.refimpl.connector import Finish, ReferenceConnector

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.outputs import KVConnectorOutput
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
    """Reports an asynchronous load as finished when it was submitted.

    Requests then use what was in the blocks before.
    """

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        sent, _ = super().get_finished(finished_req_ids)
        return sent, {load.req for load in self._metadata().loads if load.is_async} or None


class ReceivedSync(ReferenceConnector):
    """Reports synchronous loads as finished, for which the engine does not wait."""

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        sent, received = super().get_finished(finished_req_ids)
        return sent, (received or set()) | {
            load.req for load in self._metadata().loads if not load.is_async
        }


class SentUnheld(ReferenceConnector):
    """Reports every finished request as sent, even if it did not keep the blocks (B050)."""

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        sent, received = super().get_finished(finished_req_ids)
        return (sent or set()) | finished_req_ids, received


class NeverSent(ReferenceConnector):
    """Keeps the blocks of finished requests and never releases them."""

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        return None, super().get_finished(finished_req_ids)[1]


class HoldsAborted(ReferenceConnector):
    """Keeps the blocks of an aborted request, has nothing to send, and never reports it (B058)."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        loading = request.request_id in self._loading
        holds, params = super().request_finished(request, block_ids)
        return holds or (bool(block_ids) and not loading), params


class ForgetsAbortedLoad(ReferenceConnector):
    """Cancels the load of an aborted request, and never reports it: its blocks are lost (B049)."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        self._dropped.add(request.request_id)
        return super().request_finished(request, block_ids)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        super().handle_preemptions(kv_connector_metadata)
        self._load_queue.drop(lambda load: load.req in kv_connector_metadata.dropped)  # type: ignore[attr-defined]


class ReportsBoth(ReferenceConnector):
    """Reports both the load and the release of a request that is aborted while it loads (B050)."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        loading = request.request_id in self._loading
        holds, params = super().request_finished(request, block_ids)
        return holds or loading, params

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        sent, received = super().get_finished(finished_req_ids)
        aborted: set[str] = self.__dict__.setdefault("_aborted", set())
        aborted |= finished_req_ids
        return (sent or set()) | ((received or set()) & aborted), received


class Blocks(ReferenceConnector):
    """Waits in get_finished for the transfers under way, which stops every other request too."""

    def get_finished(self, finished_req_ids: set[str]) -> Finished:
        while len(self._load_queue):
            time.sleep(1.0)
        return super().get_finished(finished_req_ids)


class LoadingForEver(ReferenceConnector):
    """Takes a request for one that is loading until its end: its blocks are not held for saves."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        loading = set(self._loading)
        super().update_connector_output(connector_output)
        self._loading = loading
