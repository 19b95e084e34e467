# SPDX-License-Identifier: Apache-2.0
"""Planted defects of connectors that copy on threads, which show when the threads get no time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeAlias

from kvconform.refimpl.connector import Finish
from kvconform.refimpl.variants.hybrid_threads import HybridThreads
from kvconform.refimpl.variants.threads import SavingThreads, Threads

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.request import Request

Job: TypeAlias = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]
"""What gets the result, what to call, and its arguments."""


class NeedsNoBlocks(Threads):
    """Keeps no blocks for what its threads are still to save of a request that has ended."""

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        _, params = super().request_finished(request, block_ids)
        return False, params

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        _, received = super().get_finished(finished_req_ids)
        return None, received


class ReportsWhatIsQueued(Threads):
    """Reports that a request is saved when its last save is queued, and not when it is done."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        queued = {save.req for save, _ in self._saves if save.final}
        self._saves = [(save, future) for save, future in self._saves if not save.final]
        return (sent or set()) | queued or None, received


class OverwritesWhatIsQueued(Threads):
    """Does not wait for its threads before the blocks of a preempted request are overwritten."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        super(Threads, self).handle_preemptions(kv_connector_metadata)


class OverwritesWhatWasAborted(SavingThreads):
    """Waits for its threads before preempted blocks are overwritten, and not for aborted ones."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        dropped = set(self._dropped)
        answer = super().request_finished(request, block_ids)
        self._dropped = dropped
        return answer


class KnowsNoWindows(HybridThreads):
    """Waits for its threads when a request is preempted, and not when blocks leave a window."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        SavingThreads.handle_preemptions(self, kv_connector_metadata)


class ReportsLoadsThatBegan(Threads):
    """Reports a load when a thread has begun with it."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        begun = {load.req for load, _ in self._loads}
        sent, received = super().get_finished(finished_req_ids)
        self._loads = []
        return sent, (received or set()) | begun or None


class DiesOfAFailedLoad(Threads):
    """Copies on one thread, which the first load that fails ends; nothing is copied after it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._jobs: Queue[Job | None] = Queue()
        if self._pool is not None:
            Thread(target=self._serve, name="copies", daemon=True).start()

    def _submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, work, args))
        return future

    def _serve(self) -> None:
        for future, work, args in iter(self._jobs.get, None):
            done = work(*args)
            if done:
                raise KeyError(f"no KV for blocks {sorted(done)}")
            future.set_result(done)

    def shutdown(self) -> None:
        self._jobs.put(None)
        super().shutdown()
