# SPDX-License-Identifier: Apache-2.0
"""A KV connector that keeps blocks in a memory-mapped file of slots, one file per rank.

The scheduler half owns the index: which slot holds which block, and which slots are free. The
workers read and write the slots that the metadata names, loads before the forward pass and saves
on a thread of their own, straight from the KV cache. So the engine keeps the blocks of a finished
request until the saves from them are written, and workers wait for their writes before they run a
step that follows a preemption, since the victim's blocks may change hands in it.

Only blocks of steps whose outcome the scheduler has seen are saved. A block can be loaded when all
ranks have written it. When no slot is free, the oldest one goes that was not promised in this
step; a load of an earlier step is over in every rank before a later save can touch its slot.

The index does not outlive the scheduler, so the files begin empty with every engine.
A directory is for one engine at a time.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, group_kernel_blocks, iter_layer_specs
from vllm.v1.metrics.cache_hit_source import CacheHitSource

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

HEADER = 64
NOWHERE = -1


@dataclass(frozen=True)
class Transfer:
    """One block to be moved between a slot of the file and a block of the KV cache."""

    key: bytes
    slot: int
    block_id: int


@dataclass
class MmapMetadata(KVConnectorMetadata):
    """What the workers do in one step."""

    loads: list[Transfer] = field(default_factory=list)
    saves: dict[int, tuple[str, list[Transfer]]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    flush: bool = False


@dataclass
class MmapWorkerMetadata(KVConnectorWorkerMetadata):
    """How many ranks have written which jobs, and which keys some rank could not read."""

    written: Counter[int] = field(default_factory=Counter)
    unreadable: set[bytes] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the reports of two ranks."""
        assert isinstance(other, MmapWorkerMetadata)
        return MmapWorkerMetadata(self.written + other.written, self.unreadable | other.unreadable)


@dataclass
class RequestState:
    """What the scheduler half knows of a request."""

    request: Request
    table: list[int] = field(default_factory=list)
    next_block: int = 0
    local_tokens: int = 0
    outdated: bool = False
    jobs: set[int] = field(default_factory=set)


@dataclass
class Job:
    """Saves on their way, and how many ranks have yet to write them."""

    state: RequestState
    transfers: list[Transfer]
    ranks_left: int


class SlotIndex:
    """The slots of the files by the key of the block that they hold, oldest first."""

    def __init__(self, num_slots: int) -> None:
        self.ready: OrderedDict[bytes, int] = OrderedDict()
        self.writing: dict[bytes, int] = {}
        self._free = list(reversed(range(num_slots)))

    def __contains__(self, key: bytes) -> bool:
        return key in self.ready or key in self.writing

    def reserve(self, key: bytes, keep: set[int]) -> int | None:
        """Return a slot to write, if need be that of the oldest block that is not to be kept."""
        if not self._free:
            oldest = next((k for k, slot in self.ready.items() if slot not in keep), None)
            if oldest is None:
                return None
            self.drop([oldest])
        slot = self._free.pop()
        self.writing[key] = slot
        return slot

    def written(self, transfer: Transfer) -> None:
        """Publish a slot that all ranks have written, unless it was given up meanwhile."""
        if self.writing.get(transfer.key) == transfer.slot:
            self.ready[transfer.key] = self.writing.pop(transfer.key)
        else:
            self._free.append(transfer.slot)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget blocks that can be loaded."""
        self._free += [self.ready.pop(key) for key in list(keys) if key in self.ready]

    def clear(self) -> None:
        """Forget all blocks; slots that are being written become free when they are written."""
        self.drop(self.ready)
        self.writing.clear()


class MmapFilesConnector(KVConnectorBase_V1):
    """Stores the KV of prompts and answers in `slots` slots of a file per rank under `path`."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        groups = kv_cache_config.kv_cache_groups
        specs = [s for group in groups for s in iter_layer_specs(group.kv_cache_spec)]
        if len(groups) != 1 or not all(isinstance(s, FullAttentionSpec) for s in specs):
            raise ValueError("MmapFilesConnector needs one KV cache group of full attention.")
        if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
            raise ValueError("MmapFilesConnector supports tensor parallelism only.")
        options = self._kv_transfer_config
        self._directory = os.path.join(
            options.get_from_extra_config("path", "/tmp/vllm-kv"),
            f"replica{parallel.data_parallel_index}",
        )
        self._num_slots = int(options.get_from_extra_config("slots", 1024))
        self._block_size = vllm_config.cache_config.block_size
        self._ranks = parallel.tensor_parallel_size
        speculative = vllm_config.speculative_config
        self._unsettled_tail = int(speculative is not None and speculative.use_eagle())
        # The scheduler half.
        self._index = SlotIndex(self._num_slots)
        self._states: dict[str, RequestState] = {}
        self._jobs: dict[int, Job] = {}
        self._next_job = 0
        self._loads: list[Transfer] = []
        self._last_saves: list[tuple[RequestState, int]] = []
        self._held: set[str] = set()
        self._broken: set[int] = set()
        self._to_fail: dict[str, set[int] | None] = {}
        # The worker half.
        self._layers: list[torch.Tensor] = []
        self._slot_size = 0
        self._map: mmap.mmap | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._writes: dict[int, tuple[str, Future[None]]] = {}
        self._to_report: set[str] = set()
        self._load_errors: set[int] = set()
        self._report = MmapWorkerMetadata()

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a lost save is a loss; here it is a later miss."""
        return False

    # The scheduler half.

    def on_new_request(self, request: Request) -> None:
        """Begin to follow a request."""
        self._states[request.request_id] = RequestState(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the loadable tokens beyond the local hit, short of the request's last token."""
        self._states[request.request_id].local_tokens = num_computed_tokens
        if request.skip_reading_prefix_cache:
            return 0, False
        first = num_computed_tokens // self._block_size
        last = (request.num_tokens - 1) // self._block_size
        hits = 0
        for block_hash in request.block_hashes[first:last]:
            if bytes(block_hash) not in self._index.ready:
                break
            hits += 1
        return hits * self._block_size, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan to load the granted tokens, and make their slots the youngest."""
        if num_external_tokens == 0:
            return
        first = self._states[request.request_id].local_tokens // self._block_size
        end = first + num_external_tokens // self._block_size
        block_ids = blocks.get_block_ids()[0]
        fails = self._to_fail.pop(request.request_id, set())
        for i in range(first, end):
            key = bytes(request.block_hashes[i])
            self._index.ready.move_to_end(key)
            slot = NOWHERE if fails is None or i in fails else self._index.ready[key]
            self._loads.append(Transfer(key, slot, block_ids[i]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MmapMetadata:
        """Plan the step: the loads just granted, and saves of what earlier steps have computed."""
        preempted = scheduler_output.preempted_req_ids or set()
        meta = MmapMetadata(loads=self._loads, held=self._held, flush=bool(preempted))
        self._loads, self._held = [], set()
        for load in meta.loads:
            self._broken.discard(load.block_id)
        for state, num_blocks in self._last_saves:
            self._plan_saves(meta, state, num_blocks)
        self._last_saves = []
        for req_id in preempted & self._states.keys():
            state = self._states[req_id]
            state.table, state.next_block, state.outdated = [], 0, False

        for new in scheduler_output.scheduled_new_reqs:
            self._states[new.req_id].table = list(new.block_ids[0])
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new_block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            state = self._states[req_id]
            if req_id in cached.resumed_req_ids:
                state.table = []
            state.table += new_block_ids[0] if new_block_ids else []
        scheduled = scheduler_output.num_scheduled_tokens
        for req_id, num_tokens in scheduled.items():
            state = self._states[req_id]
            begin = state.request.num_computed_tokens // self._block_size
            end = (state.request.num_computed_tokens + num_tokens) // self._block_size
            self._broken.difference_update(state.table[begin:end])
        for req_id in scheduled:
            state = self._states[req_id]
            self._plan_saves(meta, state, self._final_blocks(state))
        return meta

    def _plan_saves(self, meta: MmapMetadata, state: RequestState, end: int) -> None:
        """Plan to save the request's blocks before `end` that no slot holds, if there is room."""
        promised = {load.slot for load in meta.loads}
        transfers = []
        for i in range(state.next_block, 0 if state.outdated else end):
            key = bytes(state.request.block_hashes[i])
            if key in self._index:
                continue
            slot = self._index.reserve(key, promised)
            if slot is None:
                break
            transfers.append(Transfer(key, slot, state.table[i]))
        state.next_block = max(state.next_block, end)
        if transfers:
            self._next_job += 1
            meta.saves[self._next_job] = (state.request.request_id, transfers)
            self._jobs[self._next_job] = Job(state, transfers, self._ranks)
            state.jobs.add(self._next_job)

    def _final_blocks(self, state: RequestState) -> int:
        """Count the leading blocks that steps have computed whose outcome is known.

        Blocks whose load failed end the count for requests that share them, until the step in
        which one of these requests has computed them again.
        """
        request = state.request
        computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        final = min(computed, request.num_tokens) - self._unsettled_tail
        end = max(0, min(final // self._block_size, len(state.table)))
        broken = (i for i, block_id in enumerate(state.table[:end]) if block_id in self._broken)
        return next(broken, end)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Publish what all ranks have written, and forget what some rank could not read."""
        report = connector_output.kv_connector_worker_meta
        if connector_output.invalid_block_ids:
            self._broken |= connector_output.invalid_block_ids
            for state in self._states.values():
                state.next_block = 0
        if not isinstance(report, MmapWorkerMetadata):
            return
        self._index.drop(report.unreadable)
        for job_id, ranks in report.written.items():
            job = self._jobs[job_id]
            job.ranks_left -= ranks
            if job.ranks_left == 0:
                for transfer in job.transfers:
                    self._index.written(transfer)
                job.state.jobs.discard(job_id)
                del self._jobs[job_id]

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks until all of the request's saves are written, the last ones included."""
        state = self._states.pop(request.request_id)
        self._to_fail.pop(request.request_id, None)
        end = min(self._final_blocks(state), len(block_ids))
        wants_more = not state.outdated and any(
            bytes(block_hash) not in self._index
            for block_hash in request.block_hashes[state.next_block : end]
        )
        if wants_more:
            self._last_saves.append((state, end))
        if wants_more or state.jobs:
            self._held.add(request.request_id)
            return True, None
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of finished requests will be free when their saves are written."""
        return bool(self._last_saves) or any(
            job.state.request.is_finished() for job in self._jobs.values()
        )

    def reset_cache(self) -> bool:
        """Forget all blocks, also those on their way; running requests add nothing older."""
        self._index.clear()
        self._last_saves = []
        for state in self._states.values():
            state.outdated = bool(state.table)
        return True

    def kvconform_fail_load(self, req_id: str, positions: Iterable[int] | None = None) -> None:
        """Make the next load of a request fail at these positions (for tests)."""
        blocks = None if positions is None else {p // self._block_size for p in positions}
        self._to_fail[req_id] = blocks

    # The worker half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep a view of each layer's cache by the engine's blocks, and map a new, empty file."""
        names = self._kv_cache_config.kv_cache_groups[0].layer_names
        num_blocks = self._kv_cache_config.num_blocks
        self._layers = [
            group_kernel_blocks(kv_caches[name], num_blocks) for name in names if name in kv_caches
        ]
        self._slot_size = HEADER + sum(layer[0].nbytes for layer in self._layers)
        os.makedirs(self._directory, exist_ok=True)
        path = os.path.join(self._directory, f"rank{get_tensor_model_parallel_rank()}.kv")
        if os.path.exists(path):
            os.remove(path)
        with open(path, "w+b") as file:
            file.truncate(self._num_slots * self._slot_size)
            self._map = mmap.mmap(file.fileno(), self._num_slots * self._slot_size)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mmap-files")

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Finish all writes before the blocks of a preempted request change hands."""
        assert isinstance(kv_connector_metadata, MmapMetadata)
        if kv_connector_metadata.flush:
            for _, write in self._writes.values():
                write.exception()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load the step's blocks, and note those that their slots do not hold."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, MmapMetadata)
        for load in meta.loads:
            if not self._read(load):
                self._load_errors.add(load.block_id)
                self._report.unreadable.add(load.key)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once, since start_load_kv has loaded all layers."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Do nothing; whole blocks are saved when all layers are done."""

    def wait_for_save(self) -> None:
        """Hand the step's saves to the writer; it may take longer than the step."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, MmapMetadata) and self._writer is not None
        if meta.saves and self._layers[0].device.type != "cpu":
            torch.accelerator.current_stream().synchronize()
        for job_id, (req_id, transfers) in meta.saves.items():
            self._writes[job_id] = (req_id, self._writer.submit(self._write, transfers))
        self._to_report |= meta.held

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report the finished requests all of whose saves are written."""
        for job_id, (_, write) in list(self._writes.items()):
            if write.done():
                if (error := write.exception()) is not None:
                    logger.error("A save failed; its blocks cannot be loaded: %s", error)
                self._report.written[job_id] += 1
                del self._writes[job_id]
        sent = self._to_report - {req_id for req_id, _ in self._writes.values()}
        self._to_report -= sent
        return sent or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Hand over the blocks that could not be loaded."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def build_connector_worker_meta(self) -> MmapWorkerMetadata | None:
        """Hand over what has been written, and what could not be read."""
        if not self._report.written and not self._report.unreadable:
            return None
        report, self._report = self._report, MmapWorkerMetadata()
        return report

    def shutdown(self) -> None:
        """Finish the writes, and close the file."""
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        if self._map is not None:
            self._map.close()
            self._map = None

    def _write(self, transfers: list[Transfer]) -> None:
        """Write slots; the key at the beginning of one says that all of it has been written."""
        assert self._map is not None
        for transfer in transfers:
            begin = transfer.slot * self._slot_size
            self._map[begin : begin + HEADER] = bytes(HEADER)
            position = begin + HEADER
            for layer in self._layers:
                block = layer[transfer.block_id].contiguous().cpu().view(torch.uint8)
                data = block.numpy().tobytes()
                self._map[position : position + len(data)] = data
                position += len(data)
            self._map[begin : begin + HEADER] = transfer.key.ljust(HEADER, b"\0")

    def _read(self, transfer: Transfer) -> bool:
        assert self._map is not None
        begin = transfer.slot * self._slot_size
        header = transfer.key.ljust(HEADER, b"\0")
        if transfer.slot == NOWHERE or self._map[begin : begin + HEADER] != header:
            return False
        position = begin + HEADER
        for layer in self._layers:
            block = layer[transfer.block_id]
            data = bytearray(self._map[position : position + block.nbytes])
            block.copy_(torch.frombuffer(data, dtype=block.dtype).view(block.shape))
            position += block.nbytes
        return True
