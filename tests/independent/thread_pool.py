# SPDX-License-Identifier: Apache-2.0
"""A KV connector that keeps blocks in files, read and written by a pool of threads.

Every full block of KV becomes one file per worker rank, named by vLLM's own hash of the block,
which chains over all that its KV depends on. Lookups are answered with an asynchronous load. Saves
read the paged cache in the background, so the blocks of a finished request stay allocated until
its saves are done, and those of a preempted request are waited for before others get its blocks.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
import zlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)
Transfer = tuple[str, int]  # the path of a file without its rank, and the block that it is for


@dataclass
class PoolMetadata(KVConnectorMetadata):
    """What the worker halves have to do in one step; final saves are of finished requests."""

    loads: dict[str, list[Transfer]] = field(default_factory=dict)
    saves: dict[str, list[Transfer]] = field(default_factory=dict)
    final_saves: dict[str, list[Transfer]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)


@dataclass
class Tracker:
    """What the scheduler half knows about a request since it was last admitted."""

    request: Request
    blocks: list[int]
    next_block: int = 0
    scheduled: bool = False
    saving: bool = False
    frozen: bool = False


class ThreadPoolConnector(KVConnectorBase_V1):
    """The connector; vLLM makes one in the scheduler and one in each worker."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if len(specs) != 1 or type(specs[0]) not in (FullAttentionSpec, MLAAttentionSpec):
            raise ValueError("ThreadPoolConnector supports one KV cache group of full attention")
        parallel = vllm_config.parallel_config
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise ValueError("ThreadPoolConnector does not support context parallelism")
        self._block_size = specs[0].block_size
        self._world_size = parallel.world_size
        extra = self._kv_transfer_config.kv_connector_extra_config
        if role == KVConnectorRole.SCHEDULER:
            self._init_scheduler(Path(extra["path"]) / _fingerprint(vllm_config, self._block_size))
        else:
            self._rank = parallel.rank
            self._pool = ThreadPoolExecutor(extra.get("threads", 4))
            self._caches: list[torch.Tensor] = []
            self._load_jobs: dict[str, list[tuple[int, Future[None]]]] = {}
            self._save_jobs: dict[str, list[Future[None]]] = {}
            self._held: set[str] = set()
            self._load_errors: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a cache miss later on, and nothing worse."""
        return False

    # Scheduler half

    def _init_scheduler(self, store: Path) -> None:
        """Open the newest generation of the store: a reset begins a new one."""
        self._store = store
        store.mkdir(parents=True, exist_ok=True)
        self._generation = max((int(path.name) for path in store.iterdir()), default=0)
        (store / str(self._generation)).mkdir(exist_ok=True)
        self._trackers: dict[str, Tracker] = {}
        self._local_tokens: dict[str, int] = {}
        self._loading: dict[str, dict[int, str]] = {}
        self._unreadable: set[str] = set()
        self._sabotage: dict[str, set[int] | None] = {}
        self._next = PoolMetadata()

    def _stem(self, request: Request, index: int) -> str:
        return str(self._store / str(self._generation) / request.block_hashes[index].hex())

    def _stored(self, stem: str) -> bool:
        """Say whether all ranks have written the block."""
        files = (f"{stem}.{rank}" for rank in range(self._world_size))
        return stem not in self._unreadable and all(map(os.path.exists, files))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the stored blocks after the local hit; the last token is left to compute."""
        self._local_tokens[request.request_id] = num_computed_tokens
        if not self._kv_transfer_config.is_kv_consumer or request.skip_reading_prefix_cache:
            return 0, False
        first = index = num_computed_tokens // self._block_size
        limit = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        while index < limit and self._stored(self._stem(request, index)):
            index += 1
        return (index - first) * self._block_size, index > first

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note the block table of an admitted request, and plan the load that was granted."""
        block_ids = blocks.get_block_ids()[0]
        self._trackers[request.request_id] = Tracker(request, list(block_ids))
        if num_external_tokens == 0:
            return
        first = self._local_tokens[request.request_id] // self._block_size
        last = first + num_external_tokens // self._block_size
        stems = [self._stem(request, index) for index in range(first, last)]
        self._next.loads[request.request_id] = list(zip(stems, block_ids[first:last], strict=True))
        self._loading[request.request_id] = dict(zip(block_ids[first:last], stems, strict=True))
        positions = self._sabotage.pop(request.request_id, set())
        for index, stem in enumerate(stems, first):
            tokens = range(index * self._block_size, (index + 1) * self._block_size)
            if positions is None or not positions.isdisjoint(tokens):
                self._remove(stem)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan the saves of the blocks that are full and final after this step."""
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            # A resumed request has got its new table in update_state_after_alloc.
            if new_blocks is not None and req_id not in cached.resumed_req_ids:
                self._trackers[req_id].blocks.extend(new_blocks[0])
        for req_id, count in scheduler_output.num_scheduled_tokens.items():
            tracker = self._trackers[req_id]
            tracker.scheduled = True
            # Placeholders and drafts are computed tokens, but not yet known ones.
            computed = tracker.request.num_computed_tokens + count
            final = min(computed, tracker.request.num_tokens)
            if saves := self._plan_saves(tracker, tracker.blocks, final):
                tracker.saving = True
                self._next.saves[req_id] = saves
        self._next.preempted = set(scheduler_output.preempted_req_ids or ())
        metadata, self._next = self._next, PoolMetadata()
        return metadata

    def _plan_saves(self, tracker: Tracker, blocks: list[int], final: int) -> list[Transfer]:
        """List the blocks of the first `final` tokens that were not looked at before."""
        if tracker.frozen or not self._kv_transfer_config.is_kv_producer:
            return []
        first = tracker.next_block
        tracker.next_block = max(first, final // self._block_size)
        return [
            (stem, blocks[index])
            for index in range(first, tracker.next_block)
            if not self._stored(stem := self._stem(tracker.request, index))
        ]

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Save what is left, and hold the blocks while any save of the request may run."""
        req_id = request.request_id
        self._local_tokens.pop(req_id, None)
        self._sabotage.pop(req_id, None)
        tracker = self._trackers.pop(req_id, None)
        if tracker is None or req_id in self._loading or not tracker.scheduled:
            # A load that still runs is reported by get_finished, which frees the blocks.
            return False, None
        # The KV of the last token was not computed, or belongs to a rejected draft.
        final = min(request.num_computed_tokens, request.num_tokens - 1)
        saves = self._plan_saves(tracker, block_ids, final)
        if not saves and not tracker.saving:
            return False, None
        self._next.final_saves[req_id] = saves
        self._next.held.add(req_id)
        return True, None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Forget files that could not be read, and loads that are over."""
        for stems in self._loading.values():
            for block_id in connector_output.invalid_block_ids & stems.keys():
                self._remove(stems[block_id])
        for req_id in connector_output.finished_recving or ():
            self._loading.pop(req_id, None)

    def _remove(self, stem: str) -> None:
        for rank in range(self._world_size):
            try:
                Path(f"{stem}.{rank}").unlink(missing_ok=True)
            except OSError:
                self._unreadable.add(stem)

    def reset_cache(self) -> bool | None:
        """Begin a new generation; KV that was computed before is not stored any more.

        Other engines over the same store begin some, too; what they save is lost until they reset.
        """
        self._generation = 1 + max(int(path.name) for path in self._store.iterdir())
        (self._store / str(self._generation)).mkdir(exist_ok=True)
        for path in self._store.iterdir():
            # A load that still runs reads an older generation; the next reset deletes it.
            if path.name != str(self._generation) and not self._loading:
                shutil.rmtree(path, ignore_errors=True)
        self._unreadable.clear()
        for tracker in self._trackers.values():
            tracker.frozen = True
        return True

    def kvconform_fail_load(self, req_id: str, positions: set[int] | None = None) -> None:
        """Lose the files of these token positions when the request's next load is planned."""
        self._sabotage[req_id] = None if positions is None else set(positions)

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the layers in a fixed order; the first dimension has to be the block."""
        for name, cache in kv_caches.items():
            if cache.device.type != "cpu":
                raise ValueError("ThreadPoolConnector supports KV caches on the CPU")
            if cache.shape[0] != self._kv_cache_config.num_blocks:
                raise ValueError(f"the first dimension of {name} is not the block")
        self._caches = [kv_caches[name] for name in sorted(kv_caches)]

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait for the saves of requests whose blocks may now go to other requests."""
        assert isinstance(kv_connector_metadata, PoolMetadata)
        for req_id in kv_connector_metadata.preempted:
            wait(self._save_jobs.pop(req_id, []))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submit the loads, and the saves of finished requests, whose KV is complete."""
        metadata = cast(PoolMetadata, self._get_connector_metadata())
        for req_id, loads in metadata.loads.items():
            self._load_jobs[req_id] = [
                (block_id, self._pool.submit(self._load, stem, block_id))
                for stem, block_id in loads
            ]
        self._held |= metadata.held
        self._submit_saves(metadata.final_saves)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request does not run before all of its KV is there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: a block is saved with all layers at once, after the forward pass."""

    def wait_for_save(self) -> None:
        """Submit the saves of this step; its KV is complete now."""
        metadata = cast(PoolMetadata, self._get_connector_metadata())
        self._submit_saves(metadata.saves)

    def _submit_saves(self, saves: dict[str, list[Transfer]]) -> None:
        for req_id, transfers in saves.items():
            jobs = self._save_jobs.setdefault(req_id, [])
            jobs.extend(self._pool.submit(self._save, *transfer) for transfer in transfers)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report held requests without a running save, and loads that have ended."""
        loads = self._load_jobs.items()
        loaded = {req_id for req_id, jobs in loads if all(job.done() for _, job in jobs)}
        for req_id in loaded:
            for block_id, job in self._load_jobs.pop(req_id):
                if (error := job.exception()) is not None:
                    logger.warning("block %d of %s was not loaded: %s", block_id, req_id, error)
                    self._load_errors.add(block_id)
        for req_id, jobs in list(self._save_jobs.items()):
            self._save_jobs[req_id] = [job for job in jobs if not job.done()]
            if not self._save_jobs[req_id]:
                del self._save_jobs[req_id]
        saved = self._held - self._save_jobs.keys()
        self._held -= saved
        return saved or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Hand over the blocks whose files could not be read."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def shutdown(self) -> None:
        """Let all saves come to an end."""
        if self.role == KVConnectorRole.WORKER:
            self._pool.shutdown(wait=True)

    def _save(self, stem: str, block_id: int) -> None:
        """Write a block under a temporary name first, so that no reader sees half of it."""
        body = b"".join(
            cache[block_id].contiguous().flatten().view(torch.uint8).numpy().tobytes()
            for cache in self._caches
        )
        path = f"{stem}.{self._rank}"
        part = f"{path}.{uuid.uuid4().hex}.part"
        try:
            with open(part, "wb") as file:
                file.write(zlib.crc32(body).to_bytes(4, "big") + body)
            os.replace(part, path)
        except OSError as error:
            logger.warning("block %d was not saved: %s", block_id, error)

    def _load(self, stem: str, block_id: int) -> None:
        """Read a block, check it, and copy it into all layers."""
        data = Path(f"{stem}.{self._rank}").read_bytes()
        body = bytearray(data[4:])
        size = sum(cache[block_id].numel() * cache.element_size() for cache in self._caches)
        if len(body) != size or zlib.crc32(body) != int.from_bytes(data[:4], "big"):
            raise ValueError(f"{stem}.{self._rank} is damaged")
        offset = 0
        for cache in self._caches:
            block = cache[block_id]
            part = torch.frombuffer(body, dtype=cache.dtype, count=block.numel(), offset=offset)
            block.copy_(part.view(block.shape))
            offset += block.numel() * cache.element_size()


def _fingerprint(vllm_config: VllmConfig, block_size: int) -> str:
    """Name the folder of all engines whose blocks have the same meaning and shape."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ranks = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    dtypes = (str(model.dtype), vllm_config.cache_config.cache_dtype)
    parts = repr((model.model, model.revision, dtypes, block_size, ranks))
    return hashlib.sha256(parts.encode()).hexdigest()[:16]
