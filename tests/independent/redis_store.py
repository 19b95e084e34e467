# SPDX-License-Identifier: Apache-2.0
"""A KV connector that keeps whole blocks of KV cache in a Redis server.

A key names a model, a generation of the store, a block hash of vLLM and the rank of a worker; its
value is the KV of that block in all layers of that worker. The scheduler half asks Redis with
EXISTS which blocks every rank has, the worker half loads them with MGET before the forward pass
and saves finished blocks in one pipeline after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import redis
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

OUTDATED_SECONDS = 60
"""How long keys of an earlier generation stay, for loads that a step in flight still makes."""


@dataclass
class Transfer:
    """Blocks of one request, and the keys (without the rank) of what they hold."""

    req_id: str
    keys: list[str]
    block_ids: list[int]


@dataclass
class RedisMetadata(KVConnectorMetadata):
    """What the workers have to do in one step, and whose blocks they give back after it."""

    step: int
    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


@dataclass
class StepDone(KVConnectorWorkerMetadata):
    """Tells the scheduler half which step's output it is looking at."""

    step: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """All workers of a step report the same number."""
        return self


@dataclass
class Tracked:
    """What the scheduler half knows about a request that has blocks, or had some."""

    request: Request
    saved_blocks: int = 0
    outdated: bool = False


class RedisStoreConnector(KVConnectorBase_V1):
    """Stores the KV of prompts and answers in Redis, block by block."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise ValueError("RedisStoreConnector does not support context parallelism.")
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("RedisStoreConnector needs a model with one KV cache group.")
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        if not all(isinstance(layer, FullAttentionSpec) for layer in iter_layer_specs(spec)):
            raise ValueError("RedisStoreConnector supports models with full attention only.")
        config = self._kv_transfer_config
        url = config.get_from_extra_config("redis_url", None)
        if not url:
            raise ValueError("RedisStoreConnector needs kv_connector_extra_config['redis_url'].")
        timeout = float(config.get_from_extra_config("timeout", 5.0))
        limits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        self._redis = redis.Redis.from_url(url, **limits)
        self._block_size = spec.block_size
        self._rank, self._world_size = parallel.rank, parallel.world_size
        self._namespace = self._make_namespace()
        self._may_save = config.is_kv_producer
        self._may_load = config.is_kv_consumer
        # The scheduler half.
        self._generation = 0
        self._step = 0
        self._tracked: dict[str, Tracked] = {}
        self._granted: dict[str, int] = {}
        self._unconfirmed: dict[int, int] = {}
        self._to_drop: dict[str, Sequence[int] | None] = {}
        self._late: list[Transfer] = []
        # The worker half.
        self._layers: list[torch.Tensor] = []
        self._failed_blocks: set[int] = set()
        self._late_done: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later on, and nothing worse."""
        return False

    def _make_namespace(self) -> str:
        """Name all that KV bytes depend on, apart from what vLLM puts into block hashes."""
        model, cache = self._vllm_config.model_config, self._vllm_config.cache_config
        parallel = self._vllm_config.parallel_config
        parts = [model.model, model.revision, model.dtype, model.quantization, cache.cache_dtype]
        parts += [cache.prefix_caching_hash_algo, self._block_size]
        parts += [parallel.tensor_parallel_size, parallel.pipeline_parallel_size]
        return "kv:" + hashlib.sha256(repr(list(map(str, parts))).encode()).hexdigest()[:16]

    # ---------------------------------------------------------------- scheduler half

    def _read_generation(self) -> int:
        """Another engine may have reset the store, so Redis has the number that counts."""
        self._generation = int(self._redis.get(f"{self._namespace}:generation") or 0)
        return self._generation

    def _keys(self, request: Request, first: int, end: int) -> list[str]:
        prefix = f"{self._namespace}:{self._generation}"
        return [f"{prefix}:{block_hash.hex()}" for block_hash in request.block_hashes[first:end]]

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the blocks behind the local hit that all ranks have, up to the last token."""
        if not self._may_load or request.skip_reading_prefix_cache:
            return 0, False
        first = num_computed_tokens // self._block_size
        end = (request.num_tokens - 1) // self._block_size
        try:
            self._read_generation()
            keys = self._keys(request, first, end)
            with self._redis.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.exists(*(f"{key}:{rank}" for rank in range(self._world_size)))
                found = pipe.execute()
        except redis.RedisError as error:
            logger.warning("Redis did not answer a lookup: %s", error)
            return 0, False
        hits = next((i for i, n in enumerate(found) if n < self._world_size), len(found))
        return hits * self._block_size, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Remember the request, and how many tokens it was granted."""
        tracked = self._tracked.setdefault(request.request_id, Tracked(request))
        tracked.outdated = False
        if num_external_tokens > 0:
            self._granted[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan this step's loads, and saves of blocks that are complete after its forward pass."""
        self._step += 1
        ended = [save.req_id for save in self._late]
        meta = RedisMetadata(self._step, saves=self._late, ended=ended)
        self._late = []
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        scheduled_tokens = scheduler_output.num_scheduled_tokens
        tables = {req_id: state.resolve_block_ids(req_id)[0] for req_id in scheduled_tokens}
        for req_id, granted in self._granted.items():
            request = self._tracked[req_id].request
            end = request.num_computed_tokens // self._block_size
            first = (request.num_computed_tokens - granted) // self._block_size
            block_ids, keys = tables[req_id][first:end], self._keys(request, first, end)
            self._drop_on_purpose(req_id, first, keys)
            meta.loads.append(Transfer(req_id, keys, block_ids))
            self._unconfirmed.update(dict.fromkeys(block_ids, self._step))
        self._granted = {}
        for req_id, scheduled in scheduled_tokens.items():
            computed = self._tracked[req_id].request.num_computed_tokens + scheduled
            save = self._plan_save(req_id, computed, tables[req_id])
            if save is not None:
                meta.saves.append(save)
        return meta

    def kvconform_fail_load(self, req_id: str, positions: Sequence[int] | None = None) -> None:
        """Make Redis lose blocks of a request's next load after they were found."""
        self._to_drop[req_id] = positions

    def _drop_on_purpose(self, req_id: str, first: int, keys: list[str]) -> None:
        if req_id in self._to_drop:
            positions = self._to_drop.pop(req_id)
            lost = None if positions is None else {p // self._block_size - first for p in positions}
            for index, key in enumerate(keys):
                if lost is None or index in lost:
                    self._redis.delete(*(f"{key}:{rank}" for rank in range(self._world_size)))

    def _plan_save(self, req_id: str, computed: int, table: list[int]) -> Transfer | None:
        """Choose the blocks to save of a request with so many computed tokens.

        Tokens that are not known yet, and drafts, do not count. While a load is not confirmed,
        nothing that was computed from it is saved: it may fail on another rank.
        """
        tracked = self._tracked[req_id]
        request = tracked.request
        end = min(computed, request.num_tokens) // self._block_size
        end = min(end, len(request.block_hashes), len(table))
        if end <= tracked.saved_blocks or tracked.outdated or not self._may_save:
            return None
        if not self._unconfirmed.keys().isdisjoint(table[:end]):
            return None
        first, tracked.saved_blocks = tracked.saved_blocks, end
        return Transfer(req_id, self._keys(request, first, end), table[first:end])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Forget loads of steps whose result the scheduler has: it has dealt with failed ones."""
        done = connector_output.kv_connector_worker_meta
        if isinstance(done, StepDone):
            pending = self._unconfirmed.items()
            self._unconfirmed = {block: step for block, step in pending if step > done.step}

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks for one more step if some of them still have to be saved."""
        self._granted.pop(request.request_id, None)
        tracked = self._tracked.get(request.request_id)
        late = None
        good = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        if tracked is not None and request.status in good:
            # A request ends regularly only when its loads went well: they are confirmed.
            for block_id in block_ids:
                self._unconfirmed.pop(block_id, None)
            processed = request.num_computed_tokens - request.num_in_flight_tokens
            late = self._plan_save(request.request_id, processed, block_ids)
        self._tracked.pop(request.request_id, None)
        if late is None:
            return False, None
        self._late.append(late)
        return True, None

    def reset_cache(self) -> bool | None:
        """Begin another generation of keys; what running requests computed belongs to the old."""
        try:
            old = f"{self._namespace}:{self._read_generation()}:*"
            self._generation = int(self._redis.incr(f"{self._namespace}:generation"))
            with self._redis.pipeline(transaction=False) as pipe:
                for key in self._redis.scan_iter(match=old, count=1000):
                    pipe.expire(key, OUTDATED_SECONDS)
                pipe.execute()
        except redis.RedisError as error:
            logger.warning("Redis did not reset the store: %s", error)
            return False
        for tracked in self._tracked.values():
            tracked.outdated = True
            tracked.saved_blocks = 0
        return True

    # ------------------------------------------------------------------- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep each layer as a view [blocks of the scheduler, heads, kernel blocks, ...].

        A block's bytes are then the same whatever the size of kernel blocks.
        """
        blocks = self._kv_cache_config.num_blocks
        for name in sorted(kv_caches):
            cache = kv_caches[name]
            rows = cache.unflatten(0, (blocks, cache.shape[0] // blocks))
            self._layers.append(rows.movedim(1, -3))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load what this step's forward pass needs, and note the blocks that Redis has lost."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RedisMetadata)
        for load in metadata.loads:
            try:
                values = self._redis.mget([f"{key}:{self._rank}" for key in load.keys])
            except redis.RedisError as error:
                logger.warning("Redis did not answer a load: %s", error)
                values = [None] * len(load.keys)
            pairs = zip(load.block_ids, values, strict=True)
            good = {block_id: value for block_id, value in pairs if value is not None}
            self._failed_blocks.update(set(load.block_ids) - good.keys())
            if good:
                self._write_blocks(list(good), list(good.values()))

    def _write_blocks(self, block_ids: list[int], values: list[bytes]) -> None:
        rows = torch.frombuffer(bytearray(b"".join(values)), dtype=torch.uint8)
        rows = rows.view(len(values), -1)
        start = 0
        for layer in self._layers:
            size = layer[0].numel() * layer.element_size()
            part = rows[:, start : start + size].contiguous().view(layer.dtype)
            part = part.view(len(values), *layer.shape[1:])
            layer[torch.tensor(block_ids, device=layer.device)] = part.to(layer.device)
            start += size

    def _read_blocks(self, block_ids: list[int]) -> list[bytes]:
        parts = []
        for layer in self._layers:
            blocks = layer[torch.tensor(block_ids, device=layer.device)]
            parts.append(blocks.contiguous().view(len(block_ids), -1).view(torch.uint8).cpu())
        return [row.numpy().tobytes() for row in torch.cat(parts, dim=1)]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing: loads are complete when start_load_kv returns."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, in wait_for_save."""

    def wait_for_save(self) -> None:
        """Send the blocks that Redis does not have, in one pipeline."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RedisMetadata)
        try:
            self._save(metadata.saves)
        except redis.RedisError as error:
            logger.warning("Redis did not take all blocks of a step: %s", error)
        self._late_done.update(metadata.ended)

    def _save(self, saves: list[Transfer]) -> None:
        wanted: dict[str, int] = {}
        for save in saves:
            keys = (f"{key}:{self._rank}" for key in save.keys)
            wanted.update(zip(keys, save.block_ids, strict=True))
        with self._redis.pipeline(transaction=False) as pipe:
            for key in wanted:
                pipe.exists(key)
            missing = [key for key, n in zip(wanted, pipe.execute(), strict=True) if not n]
            if missing:
                values = self._read_blocks([wanted[key] for key in missing])
                for key, value in zip(missing, values, strict=True):
                    pipe.set(key, value)
                pipe.execute()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Give back the blocks that were kept for a save after the end of their request."""
        done, self._late_done = self._late_done, set()
        return done or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report each block that could not be loaded once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Say which step this output is of."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RedisMetadata)
        return StepDone(metadata.step)

    def shutdown(self) -> None:
        """Close the connections."""
        self._redis.close()
