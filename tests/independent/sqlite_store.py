# SPDX-License-Identifier: Apache-2.0
"""A synchronous KV connector that keeps whole blocks as blobs in an SQLite file.

The scheduler half looks block hashes up in the file and plans, for every step, which blocks the
workers load before the forward pass and which they save after it. A row belongs to one block and
one tensor-parallel rank and holds the block's KV of all layers. The file outlives the engine.

A block is planned for saving in the first step after which its KV is final: all of its tokens are
known (no placeholder, no draft), and the step or an earlier one computes them. The one thing that
the scheduler half cannot know by then is whether a synchronous load of this step or of one in
flight fails. So a save names the freshly loaded blocks that it rests on, and a worker whose load
of one of them failed leaves the save out. Rows of one block count only if all ranks wrote them in
the same step, so that a save that some rank left out is no block at all.

A reset begins a new generation. Rows of older generations are never looked at again, and each
worker deletes its own when it first meets the new generation, by which time its loads are over.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
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

SCHEMA = """
CREATE TABLE IF NOT EXISTS generation (id INTEGER PRIMARY KEY CHECK (id = 0), value INTEGER);
INSERT OR IGNORE INTO generation VALUES (0, 0);
CREATE TABLE IF NOT EXISTS blocks (
    generation INTEGER, key BLOB, rank INTEGER, writer TEXT, data BLOB,
    PRIMARY KEY (generation, key, rank));
"""


@dataclass
class Save:
    """Blocks of one request to be saved, and the fresh loads that their KV rests on."""

    blocks: list[tuple[bytes, int]]
    rests_on: list[int]


@dataclass
class SqliteMetadata(KVConnectorMetadata):
    """What the workers do in one step; a block is a pair of key and block id."""

    step: int
    settled: int
    generation: int
    writer: str
    loads: list[tuple[bytes, int]] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass
class StepDone(KVConnectorWorkerMetadata):
    """The step that a worker has run."""

    step: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the reports of two ranks, which are always about the same step."""
        assert isinstance(other, StepDone) and other.step == self.step
        return self


@dataclass
class Tracked:
    """An admitted request, and how many of its leading blocks need no more attention."""

    request: Request
    next_block: int = 0
    outdated: bool = False


def blocks_of(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """View a layer with the engine's blocks first, each with its tokens in their order.

    Attention may work on parts of a block: then [blocks, parts, heads, tokens, values] becomes
    [blocks, heads, parts, tokens, values], whose bytes are those of a whole block.
    """
    grouped = group_kernel_blocks(cache, num_blocks)
    return grouped if grouped.dim() == cache.dim() else grouped.movedim(1, -3)


class SqliteStoreConnector(KVConnectorBase_V1):
    """Stores the KV of prompts and answers block by block in `path`, an SQLite file."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        groups = kv_cache_config.kv_cache_groups
        specs = [s for group in groups for s in iter_layer_specs(group.kv_cache_spec)]
        if len(groups) != 1 or not all(isinstance(s, FullAttentionSpec) for s in specs):
            raise ValueError("SqliteStoreConnector needs one KV cache group of full attention.")
        if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
            raise ValueError("SqliteStoreConnector supports tensor parallelism only.")
        self._block_size = vllm_config.cache_config.block_size
        self._ranks = parallel.tensor_parallel_size
        path = self._kv_transfer_config.get_from_extra_config("path", None)
        if not path:
            raise ValueError("SqliteStoreConnector needs the option `path`.")
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.executescript(SCHEMA)

        speculative = vllm_config.speculative_config
        self._unsettled_tail = int(speculative is not None and speculative.use_eagle())
        model = vllm_config.model_config
        identity = (
            *(model.model, model.revision, str(model.dtype), vllm_config.cache_config.cache_dtype),
            *(self._block_size, self._ranks, groups[0].layer_names),
        )
        self._namespace = hashlib.sha256(repr(identity).encode()).digest()[:16]
        # The scheduler half.
        self._name = uuid.uuid4().hex
        self._step = 0
        self._settled = 0
        self._tracked: dict[str, Tracked] = {}
        self._local_tokens: dict[str, int] = {}
        self._loads: list[tuple[bytes, int]] = []
        self._loaded_in: dict[int, int] = {}
        self._broken: set[int] = set()
        self._to_fail: dict[str, set[int] | None] = {}
        # The worker half.
        self._rank = parallel.rank % self._ranks
        self._layers: list[torch.Tensor] = []
        self._generation = -1
        self._failed_in: dict[int, int] = {}
        self._load_errors: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a lost save is a loss; here it is a later miss."""
        return False

    def shutdown(self) -> None:
        """Close the file."""
        self._db.close()

    # The scheduler half.

    def _key(self, block_hash: bytes) -> bytes:
        return self._namespace + bytes(block_hash)

    def _current_generation(self) -> int:
        return self._db.execute("SELECT value FROM generation").fetchone()[0]

    def _is_stored(self, generation: int, key: bytes) -> bool:
        query = "SELECT COUNT(*), COUNT(DISTINCT writer) FROM blocks WHERE generation=? AND key=?"
        ranks, writers = self._db.execute(query, (generation, key)).fetchone()
        return ranks == self._ranks and writers == 1

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the stored tokens beyond the local hit, short of the request's last token."""
        self._local_tokens[request.request_id] = num_computed_tokens
        if request.skip_reading_prefix_cache or not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        generation = self._current_generation()
        first = num_computed_tokens // self._block_size
        last = (request.num_tokens - 1) // self._block_size
        stored = 0
        for block_hash in request.block_hashes[first:last]:
            if not self._is_stored(generation, self._key(block_hash)):
                break
            stored += 1
        return stored * self._block_size, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note the blocks that the granted tokens are to be loaded into."""
        known = self._tracked.get(request.request_id)
        if known is None or known.request is not request or request.num_computed_tokens == 0:
            self._tracked[request.request_id] = Tracked(request)
        local = self._local_tokens.pop(request.request_id, 0)
        if num_external_tokens == 0:
            return
        first = local // self._block_size
        end = (local + num_external_tokens) // self._block_size
        block_ids = blocks.get_block_ids()[0]
        loads = [(self._key(request.block_hashes[i]), block_ids[i]) for i in range(first, end)]
        self._loads += loads
        if request.request_id in self._to_fail:
            hit = self._to_fail.pop(request.request_id)
            lost = [(key,) for i, (key, _) in enumerate(loads, first) if hit is None or i in hit]
            self._db.executemany("DELETE FROM blocks WHERE key=?", lost)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SqliteMetadata:
        """Plan the step: the loads just granted, and every block whose KV the step makes final."""
        self._step += 1
        for _, block_id in self._loads:
            self._loaded_in[block_id] = self._step
            self._broken.discard(block_id)
        meta = SqliteMetadata(
            step=self._step,
            settled=self._settled,
            generation=self._current_generation(),
            writer=f"{self._name}:{self._step}",
            loads=self._loads,
        )
        self._loads = []
        tables = scheduler_output.kv_connector_block_state
        if tables is None or not self._kv_transfer_config.is_kv_producer:
            return meta
        for req_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(req_id)
            table = tables.get_block_ids(req_id)
            if tracked is None or tracked.outdated or table is None:
                continue
            request = tracked.request
            computed = request.num_computed_tokens
            final = min(request.num_tokens, computed + num_scheduled)
            end = min((final - self._unsettled_tail) // self._block_size, len(table[0]))
            end = self._sound_blocks(table[0][:end], computed)
            blocks = [
                (self._key(request.block_hashes[i]), table[0][i])
                for i in range(tracked.next_block, end)
            ]
            tracked.next_block = max(tracked.next_block, end)
            blocks = [b for b in blocks if not self._is_stored(meta.generation, b[0])]
            if blocks:
                rests_on = [block_id for block_id in table[0][:end] if block_id in self._loaded_in]
                meta.saves.append(Save(blocks, rests_on))
        return meta

    def _sound_blocks(self, block_ids: list[int], num_computed_tokens: int) -> int:
        """Count the leading blocks whose KV does not wait for another request to repair it.

        After a failed load one request computes the block again, and those that share it go on as
        if it were computed. It is sound when the one that computes it has reached its end.
        """
        for i, block_id in enumerate(block_ids):
            if block_id in self._broken:
                if num_computed_tokens >= (i + 1) * self._block_size:
                    return i
                self._broken.discard(block_id)
        return len(block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn how far the workers are, and look at all blocks again after a failed load."""
        done = connector_output.kv_connector_worker_meta
        if isinstance(done, StepDone):
            self._settled = done.step
            self._loaded_in = {b: step for b, step in self._loaded_in.items() if step > done.step}
        if connector_output.invalid_block_ids:
            self._broken |= connector_output.invalid_block_ids
            for tracked in self._tracked.values():
                tracked.next_block = 0

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; its saves need no more time."""
        self._tracked.pop(request.request_id, None)
        self._local_tokens.pop(request.request_id, None)
        self._to_fail.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Begin a new generation, to which running requests with older KV add nothing."""
        self._db.execute("UPDATE generation SET value = value + 1")
        for tracked in self._tracked.values():
            tracked.outdated = True
        return True

    def kvconform_fail_load(self, req_id: str, positions: Iterable[int] | None = None) -> None:
        """Make the next load of a request fail at these positions (for tests)."""
        blocks = None if positions is None else {p // self._block_size for p in positions}
        self._to_fail[req_id] = blocks

    # The worker half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep a view of each layer's cache whose first dimension is the engine's blocks."""
        names = self._kv_cache_config.kv_cache_groups[0].layer_names
        self._layers = [
            blocks_of(kv_caches[name], self._kv_cache_config.num_blocks)
            for name in names
            if name in kv_caches
        ]

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load the step's blocks, and note those that are not there (any more)."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, SqliteMetadata)
        self._failed_in = {b: step for b, step in self._failed_in.items() if step > meta.settled}
        if meta.generation > self._generation:
            self._generation = meta.generation
            self._db.execute(
                "DELETE FROM blocks WHERE generation<? AND rank=? AND substr(key, 1, 16)=?",
                (meta.generation, self._rank, self._namespace),
            )
        for key, block_id in meta.loads:
            row = self._db.execute(
                "SELECT data FROM blocks WHERE generation=? AND key=? AND rank=?",
                (meta.generation, key, self._rank),
            ).fetchone()
            if row is None or not self._unpack(row[0], block_id):
                self._load_errors.add(block_id)
                self._failed_in[block_id] = meta.step

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
        """Write the step's blocks in one transaction."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, SqliteMetadata)
        rows = [
            (meta.generation, key, self._rank, meta.writer, self._pack(block_id))
            for save in meta.saves
            if self._failed_in.keys().isdisjoint(save.rests_on)
            for key, block_id in save.blocks
        ]
        if not rows:
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.OperationalError:  # the disk is full: a later lookup misses
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def build_connector_worker_meta(self) -> StepDone | None:
        """Say which step this was."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, SqliteMetadata)
        return StepDone(meta.step)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Hand over the blocks that could not be loaded."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def _pack(self, block_id: int) -> bytes:
        parts = [layer[block_id].contiguous().cpu().view(torch.uint8) for layer in self._layers]
        return b"".join(part.numpy().tobytes() for part in parts)

    def _unpack(self, data: bytes, block_id: int) -> bool:
        targets = [layer[block_id] for layer in self._layers]
        if len(data) != sum(target.nbytes for target in targets):
            return False
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        start = 0
        for target in targets:
            part = source[start : start + target.nbytes]
            target.copy_(part.view(target.dtype).view(target.shape))
            start += target.nbytes
        return True
