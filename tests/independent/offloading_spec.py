# SPDX-License-Identifier: Apache-2.0
"""A medium for vLLM's OffloadingConnector: a swap file on disk.

Each worker has one swap file without a name, which is divided into slots of one chunk. The
manager in the scheduler process gives slots to chunks and takes those of the chunks that were
used least recently. A thread of the worker reads and writes the file; the device is touched
only by the worker's own thread: KV is taken from it when a store is submitted, and put back
when a load that has been read is collected.

Options (``kv_connector_extra_config``): ``swap_dir`` is the folder for the swap files,
``swap_chunks`` how many chunks they hold (default 1024). KV does not outlive the engine.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import torch
from typing_extensions import override
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource


class SwapSlots(LoadStoreSpec):
    """The slots of the chunks of a transfer, in the order of its groups and tokens."""

    def __init__(self, slots: list[int]) -> None:
        """Name the slots."""
        self.slots = slots


@dataclass(slots=True)
class Chunk:
    """Where a chunk is kept, and who needs it."""

    slot: int
    written: bool = False
    readers: int = 0

    @property
    def idle(self) -> bool:
        """Whether the slot may be given to another chunk."""
        return self.written and self.readers == 0


class SwapManager(OffloadingManager):
    """Gives slots to chunks, the least recently used ones first."""

    def __init__(self, num_slots: int, with_events: bool) -> None:
        """Begin with nothing stored."""
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        # The least recently used chunk is first.
        self._chunks: OrderedDict[OffloadKey, Chunk] = OrderedDict()
        self._with_events = with_events
        self._events: list[OffloadingEvent] = []

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        chunk = self._chunks.get(key)
        if chunk is None:
            return LookupResult.MISS
        return LookupResult.HIT if chunk.written else LookupResult.HIT_PENDING

    @override
    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.DISK

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self.touch(keys, req_context)
        slots = []
        for key in keys:
            chunk = self._chunks[key]
            assert chunk.written, "a chunk is to be read before it has been written"
            chunk.readers += 1
            slots.append(chunk.slot)
        return SwapSlots(slots)

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        for key in keys:
            self._chunks[key].readers -= 1

    @override
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        for key in keys:
            if key in self._chunks:
                self._chunks.move_to_end(key)

    @override
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self.touch(keys, req_context)
        wanted = [key for key in keys if key not in self._chunks]
        evicted: list[OffloadKey] = []
        if len(wanted) > len(self._free):
            evicted = self._oldest_idle(len(wanted) - len(self._free), set(keys))
            if len(evicted) < len(wanted) - len(self._free):
                return None
        for key in evicted:
            self._free.append(self._chunks.pop(key).slot)
        for key in wanted:
            self._chunks[key] = Chunk(self._free.pop())
        self._report(evicted, removed=True)
        slots = [self._chunks[key].slot for key in wanted]
        return PrepareStoreOutput(wanted, SwapSlots(slots), evicted)

    @override
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        unwritten = [key for key in keys if not self._chunks[key].written]
        for key in unwritten:
            if success:
                self._chunks[key].written = True
            else:
                self._free.append(self._chunks.pop(key).slot)
        if success:
            self._report(unwritten, removed=False)

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    @override
    def reset_cache(self) -> None:
        # Completions of transfers from before the reset are dropped by vLLM's scheduler half,
        # and a worker finishes them before it begins later ones.
        self._chunks.clear()
        self._free = list(range(self._num_slots))

    def _oldest_idle(self, number: int, keep: set[OffloadKey]) -> list[OffloadKey]:
        """Return at most this many chunks that no request needs, the oldest first."""
        idle: list[OffloadKey] = []
        for key, chunk in self._chunks.items():
            if len(idle) == number:
                break
            if chunk.idle and key not in keep:
                idle.append(key)
        return idle

    def _report(self, keys: list[OffloadKey], removed: bool) -> None:
        """Publish which chunks were stored and which were removed."""
        if keys and self._with_events:
            self._events.append(OffloadingEvent(keys, Medium.STORAGE, removed, Locality.LOCAL))


class Piece(NamedTuple):
    """Consecutive blocks of one group inside one chunk."""

    group: int
    block_ids: list[int]
    offset: int


@dataclass
class Transfer:
    """A transfer that the thread works on, or has done."""

    work: Future[list[torch.Tensor]]
    pieces: list[Piece]
    is_load: bool
    num_bytes: int
    started: float


class SwapWorker(OffloadingWorker):
    """Moves blocks between the KV cache of one worker and its swap file."""

    def __init__(self, kv_caches: CanonicalKVCaches, spec: SwapSpec) -> None:
        """Open the swap file."""
        self._refs = kv_caches.group_data_refs
        self._tensors = [entry.tensor for entry in kv_caches.tensors]
        self._blocks_per_chunk = spec.blocks_per_chunk
        self._block_bytes = [sum(ref.page_size_bytes for ref in refs) for refs in self._refs]
        self._slot_bytes = max(self._block_bytes) * spec.blocks_per_chunk
        self._file = tempfile.TemporaryFile(dir=spec.swap_dir)  # noqa: SIM115
        # One thread: transfers are done in the order in which they were submitted.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-swap")
        self._transfers: dict[int, Transfer] = {}

    @override
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        pieces = self._pieces(src_spec, dst_spec)
        pages = [self._take(piece) for piece in pieces]
        work = self._thread.submit(self._write, pieces, pages)
        self._transfers[job_id] = self._transfer(work, pieces, is_load=False)
        return True

    @override
    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        pieces = self._pieces(dst_spec, src_spec)
        work = self._thread.submit(self._read, pieces)
        self._transfers[job_id] = self._transfer(work, pieces, is_load=True)
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        results = []
        for job_id, transfer in list(self._transfers.items()):
            if not transfer.work.done():
                continue
            del self._transfers[job_id]
            pages = transfer.work.result()
            if transfer.is_load:
                for piece, page in zip(transfer.pieces, pages, strict=True):
                    self._put(piece, page)
            seconds = time.monotonic() - transfer.started
            results.append(TransferResult(job_id, True, transfer.num_bytes, seconds))
        return results

    @override
    def wait(self, job_ids: set[int]) -> None:
        wait([self._transfers[job_id].work for job_id in job_ids if job_id in self._transfers])

    @override
    def shutdown(self) -> None:
        self._thread.shutdown()
        self._transfers.clear()
        self._file.close()

    def _pieces(self, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec) -> list[Piece]:
        """Pair the blocks of each group with the places of their chunks in the file.

        Only the first chunk of a group may be entered behind its beginning.
        """
        assert isinstance(chunks, SwapSlots)
        slots = iter(chunks.slots)
        block_ids = iter(blocks.block_ids.tolist())
        pieces = []
        for group, size in enumerate(blocks.group_sizes):
            inside = blocks.block_indices[group] % self._blocks_per_chunk
            while size:
                number = min(size, self._blocks_per_chunk - inside)
                offset = next(slots) * self._slot_bytes + inside * self._block_bytes[group]
                pieces.append(Piece(group, [next(block_ids) for _ in range(number)], offset))
                size -= number
                inside = 0
        assert next(slots, None) is None, "more chunks than blocks"
        return pieces

    def _transfer(
        self, work: Future[list[torch.Tensor]], pieces: list[Piece], is_load: bool
    ) -> Transfer:
        """Describe a transfer that was just submitted."""
        num_bytes = sum(len(p.block_ids) * self._block_bytes[p.group] for p in pieces)
        return Transfer(work, pieces, is_load, num_bytes, time.monotonic())

    def _take(self, piece: Piece) -> torch.Tensor:
        """Copy blocks from the device: one row per block, all layers of the group in it."""
        pages = [
            self._tensors[ref.tensor_idx][piece.block_ids, : ref.page_size_bytes].cpu()
            for ref in self._refs[piece.group]
        ]
        return torch.cat(pages, dim=1)

    def _put(self, piece: Piece, rows: torch.Tensor) -> None:
        """Copy rows that ``_take`` made to blocks of the device, before its next step."""
        sizes = [ref.page_size_bytes for ref in self._refs[piece.group]]
        for ref, page in zip(self._refs[piece.group], rows.split(sizes, dim=1), strict=True):
            tensor = self._tensors[ref.tensor_idx]
            tensor[piece.block_ids, : ref.page_size_bytes] = page.to(tensor.device)

    def _write(self, pieces: list[Piece], pages: list[torch.Tensor]) -> list[torch.Tensor]:
        """Write rows to the file, in the thread."""
        for piece, rows in zip(pieces, pages, strict=True):
            data = rows.numpy().tobytes()
            if os.pwrite(self._file.fileno(), data, piece.offset) != len(data):
                raise OSError("the swap file could not be written")
        return []

    def _read(self, pieces: list[Piece]) -> list[torch.Tensor]:
        """Read rows from the file, in the thread."""
        pages = []
        for piece in pieces:
            shape = (len(piece.block_ids), self._block_bytes[piece.group])
            data = os.pread(self._file.fileno(), shape[0] * shape[1], piece.offset)
            pages.append(torch.frombuffer(bytearray(data), dtype=torch.int8).view(shape))
        return pages


class SwapSpec(OffloadingSpec):
    """Offloads KV to swap files."""

    def __init__(self, config: OffloadingConfig) -> None:
        """Check the options."""
        super().__init__(config)
        if config.canonical_layout:
            raise ValueError("SwapSpec does not support canonical_layout.")
        swap_dir = self.extra_config.get("swap_dir")
        if not swap_dir:
            raise ValueError("SwapSpec needs 'swap_dir' in kv_connector_extra_config.")
        self.swap_dir = str(swap_dir)
        self._num_chunks = int(self.extra_config.get("swap_chunks", 1024))
        self._worker: SwapWorker | None = None

    @override
    def get_manager(self) -> OffloadingManager:
        return SwapManager(self._num_chunks, self.kv_events_config.enable_kv_cache_events)

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            os.makedirs(self.swap_dir, exist_ok=True)
            self._worker = SwapWorker(kv_caches, self)
        return self._worker
