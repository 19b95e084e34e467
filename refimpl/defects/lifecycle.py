# SPDX-License-Identifier: Apache-2.0
"""Planted defects: metadata, the end of requests, reset and shutdown."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvconform.compat.vllm_api import FINISHED_ERROR
from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector
from kvconform.refimpl.paging import write_slots
from kvconform.refimpl.plan import Load, Save
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KeepsTheEnginesLists(ReferenceConnector):
    """Keeps the lists of blocks of the SchedulerOutput, which model runner V1 extends, too."""

    def _extend_table(
        self, tracked: Tracked, new_blocks: Sequence[Sequence[int]] | None, replaces: bool
    ) -> None:
        if replaces and new_blocks:
            tracked.table = new_blocks[0]  # type: ignore[assignment]
        else:
            super()._extend_table(tracked, new_blocks, replaces)


class NamesFilesByRequest(ReferenceConnector):
    """Has a file for each save, which has the request's id as its name."""

    def _save(self, epoch: int, save: Save, layers: Iterable[str]) -> None:
        path = Path(self.options.store, save.req)
        path.touch()
        super()._save(epoch, save, layers)
        path.unlink()


class NoneMetadata(ReferenceConnector):
    """Returns no metadata in steps in which nothing is scheduled."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        return metadata if scheduler_output.total_num_scheduled_tokens else None  # type: ignore[return-value]


class ReusesMetadata(ReferenceConnector):
    """Refills one metadata object in every step, while the worker may still use it."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        reused: KVConnectorMetadata = self.__dict__.setdefault("_reused", metadata)
        reused.__dict__.update(metadata.__dict__)
        return reused


class Unpicklable(ReferenceConnector):
    """Puts a lock into the metadata, which cannot travel to another process."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        metadata.__dict__["lock"] = threading.Lock()
        return metadata


class MutatesOutput(ReferenceConnector):
    """Clears the finished requests of the scheduler's output, which the worker then never sees."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        scheduler_output.finished_req_ids.clear()
        return metadata


class DropsAdapters(ReferenceConnector):
    """Takes the adapter out of the data of a new request, which then runs on the base model."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            new.lora_request = None
        return metadata


class EditsOutput(ReferenceConnector):
    """Empties what it has seen in the scheduler's output: resumed requests, and new blocks."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        cached.resumed_req_ids.clear()
        cached.new_block_ids[:] = [None] * len(cached.new_block_ids)
        return metadata


class KeepsBlockState(ReferenceConnector):
    """Puts the step's block state, a live view of the scheduler, into the metadata."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        metadata.__dict__["state"] = scheduler_output.kv_connector_block_state
        return metadata


class MonotonicProgress(ReferenceConnector):
    """Asserts that the computed tokens of a request never decrease.

    They decrease when a load fails, and when drafts are rejected.
    """

    def _save_bound(self, request: Request, computed: int, scheduled: int) -> int:
        tracked = self._tracked[request.request_id]
        assert computed >= tracked.__dict__.get("computed", 0)
        tracked.__dict__["computed"] = computed
        return super()._save_bound(request, computed, scheduled)


class UnknownFinish(ReferenceConnector):
    """Fails at the end of a request that never got blocks (B112)."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        assert self._tracked[request.request_id] is not None
        return super().request_finished(request, block_ids)


class EmptyBlocks(ReferenceConnector):
    """Assumes that a finished request has blocks (B057)."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        assert block_ids[-1] >= 0
        return super().request_finished(request, block_ids)


class LiveParams(ReferenceConnector):
    """Writes its answer into the request's own parameters, which the engine then extends."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        holds, _ = super().request_finished(request, block_ids)
        if request.kv_transfer_params is not None:
            request.kv_transfer_params["do_remote_prefill"] = True
        return holds, request.kv_transfer_params


class KnowsAllParams(ReferenceConnector):
    """Raises for a transfer parameter that it does not know (B062)."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        unknown = (request.kv_transfer_params or {}).keys() - {"skip_save"}
        if unknown:
            raise TypeError(f"unexpected parameters: {sorted(unknown)}")
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class FinishAfterNew(ReferenceConnector):
    """Cleans up finished requests in the next step, and then drops a new request of the same id."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        for req_id in scheduler_output.finished_req_ids:
            self._tracked.pop(req_id, None)
            self._granted.pop(req_id, None)
        return super().build_connector_meta(scheduler_output)


class BoundTooEarly(ReferenceConnector):
    """Reads the bound metadata in handle_preemptions, when none is bound."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        super().handle_preemptions(self._metadata())


class KeepsRequests(ReferenceConnector):
    """Keeps every request that it has seen (B059)."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        self.__dict__.setdefault("_history", []).append(request)
        return super().request_finished(request, block_ids)


class ResetKeeps(ReferenceConnector):
    """Reports that its cache was reset, and goes on serving it (B086)."""

    def reset_cache(self) -> bool | None:
        return True


class SavesAcrossReset(ReferenceConnector):
    """Publishes a save that was under way during a reset."""

    def _save(self, epoch: int, save: Save, layers: Any) -> None:
        super()._save(self._store.epoch(), save, layers)


class LoadsAcrossReset(ReferenceConnector):
    """Takes chunks that a reset has removed under a load for loaded."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = super().get_block_ids_with_load_errors()
        return set() if self._store.epoch() else failed


class ReusesSlotsOfLoads(ReferenceConnector):
    """Stores chunks in numbered places, and frees all of them in a reset.

    A load that was queued before goes on reading places that later saves have taken.
    """

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._metadata().loads:
            for piece in load.pieces:
                if piece.key in self._place:
                    self._read[piece.key] = self._place[piece.key]
        super().start_load_kv(forward_context, **kwargs)

    def _put(self, epoch: int, key: str, layer: str, data: bytes, tokens: int) -> None:
        super()._put(epoch, key, layer, data, tokens)
        if epoch != self.__dict__.get("_epoch", epoch):
            self._place.clear()
        self._epoch = epoch
        self._content[self._place.setdefault(key, len(self._place)), layer] = data

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        for piece in load.pieces:
            place = self._read.pop(piece.key)
            for layer in layers:
                data = self._content[place, layer]
                write_slots(self._layers[layer], piece.slots, data, piece.first, self._share)

    @property
    def _place(self) -> dict[str, int]:
        return self.__dict__.setdefault("_places", {})

    @property
    def _read(self) -> dict[str, int]:
        return self.__dict__.setdefault("_reads", {})

    @property
    def _content(self) -> dict[tuple[int, str], bytes]:
        return self.__dict__.setdefault("_contents", {})


class ForgetsEndsOnReset(ReferenceConnector):
    """Keeps what it knows of a request until a step's metadata tells of its end.

    A reset drops the ends that no metadata has told yet.
    """

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            self.__dict__.setdefault("_known", {})[request.request_id] = tracked
            self.__dict__.setdefault("_ends", set()).add(request.request_id)
        return super().request_finished(request, block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        for req in self.__dict__.pop("_ends", ()):
            del self.__dict__["_known"][req]
        return super().build_connector_meta(scheduler_output)

    def reset_cache(self) -> bool | None:
        self.__dict__.pop("_ends", None)
        return super().reset_cache()


class ShutdownOnce(ReferenceConnector):
    """Cannot be shut down twice (B132)."""

    def shutdown(self) -> None:
        super().shutdown()
        del self._bad


class ShutdownWhenDone(ReferenceConnector):
    """Takes for granted that every request has ended when the engine does (B112)."""

    def shutdown(self) -> None:
        super().shutdown()
        assert not self._tracked


class SavesTooEarly(ReferenceConnector):
    """Reads the blocks when the metadata is bound, before the forward pass writes them (B007)."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        for save in self._metadata().saves:
            super()._save(self._metadata().epoch, save, self._layers)

    def wait_for_save(self) -> None:
        return


class FreesWhatItNeverTook(ReferenceConnector):
    """Frees the blocks of a request that finishes, which the engine frees, too."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        self._pool.free_blocks(self._pool.blocks[block] for block in reversed(block_ids))
        return super().request_finished(request, block_ids)


class FreesWhatRuns(ReferenceConnector):
    """Frees the first block of a new request when the worker has had it, and never touches it."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        self._passed: list[int] = []

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._passed += [new.block_ids[0][0] for new in scheduler_output.scheduled_new_reqs]
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        self._pool.free_blocks(self._pool.blocks[block] for block in self._passed)
        self._passed = []


_resets: dict[str, int] = {}


class ResetsInMemory(ReferenceConnector):
    """Counts the resets of its store in memory, and leaves what was stored before where it is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._store.__dict__.update(epoch=self._number, reset=self._next)

    def _number(self) -> int:
        return _resets.get(str(self.options.store), 0)

    def _next(self) -> bool:
        _resets[str(self.options.store)] = self._number() + 1
        return True


REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_IGNORED: "length",
    FINISHED_ERROR: "error",
}


class KnowsFiveReasons(ReferenceConnector):
    """Looks the end of a request up in a table that lacks one of vLLM's reasons."""

    def request_finished(self, request: Request, block_ids: list[int]) -> Finish:
        self.__dict__.setdefault("reasons", []).append(REASONS[request.status])
        return super().request_finished(request, block_ids)
