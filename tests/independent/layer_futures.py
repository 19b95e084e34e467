# SPDX-License-Identifier: Apache-2.0
"""A KV connector that loads and saves layer by layer, with one future per layer and step.

A saved block is an entry: a folder with one file per rank and layer, each a dict that torch.save
wrote. An entry becomes visible when the scheduler half writes a reference, a file that is named by
vLLM's hash of the block and holds the entry's name. It does so after all ranks have reported all
layers, and only if no load that the KV was computed on has failed: a failed synchronous load is
known after the steps that used it were planned, and after some of them have run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
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


@dataclass
class LayerMetadata(KVConnectorMetadata):
    """The entries of one step: to load or to save (with the block), and to delete."""

    loads: list[tuple[str, int]] = field(default_factory=list)
    saves: list[tuple[str, int]] = field(default_factory=list)
    deletes: list[str] = field(default_factory=list)


@dataclass
class SavedEntries(KVConnectorWorkerMetadata):
    """How many ranks have written all of their layers of an entry."""

    ranks: Counter[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add up the reports of two ranks."""
        assert isinstance(other, SavedEntries)
        return SavedEntries(self.ranks + other.ranks)


@dataclass
class Draft:
    """An entry that is not visible yet."""

    key: str
    depends_on: frozenset[int]
    ranks: int = 0


@dataclass
class Progress:
    """How far the blocks of an admitted request have been looked at."""

    request: Request
    blocks: list[int]
    next_block: int = 0
    doubtful: bool = False


class LayerFuturesConnector(KVConnectorBase_V1):
    """The connector; vLLM makes one in the scheduler and one in each worker."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        specs = [type(group.kv_cache_spec) for group in groups]
        if specs not in ([FullAttentionSpec], [MLAAttentionSpec]):
            raise ValueError("LayerFuturesConnector supports one group of full attention layers")
        parallel = vllm_config.parallel_config
        if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size != 1:
            raise ValueError("LayerFuturesConnector does not support context parallelism")
        self._block_size = groups[0].kv_cache_spec.block_size
        self._world_size = parallel.world_size
        extra = self._kv_transfer_config.kv_connector_extra_config
        if role == KVConnectorRole.SCHEDULER:
            self._store = Path(extra["directory"]) / _engine_name(vllm_config, self._block_size)
            (self._store / "references").mkdir(parents=True, exist_ok=True)
            self._progress: dict[str, Progress] = {}
            self._local_tokens: dict[str, int] = {}
            self._drafts: dict[str, Draft] = {}
            self._last_loaded: dict[int, str] = {}
            self._suspects: set[int] = set()
            self._fail: dict[str, set[int] | None] = {}
            self._next = LayerMetadata()
        else:
            self._rank = str(parallel.rank)
            self._pool = ThreadPoolExecutor(int(extra.get("threads", 4)))
            self._caches: dict[str, torch.Tensor] = {}
            self._loads: dict[str, Future[set[int]]] = {}
            self._saves: dict[str, Future[set[str]]] = {}
            self._saved: Counter[str] = Counter()

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a cache miss later on, and nothing worse."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Ask for graphs that leave room for the calls around each layer."""
        return True

    # Scheduler half

    def _reference(self, key: str) -> Path:
        return self._store / "references" / key

    def _entry(self, key: str) -> str | None:
        """Return the folder of a visible entry."""
        try:
            return str(self._store / self._reference(key).read_text())
        except FileNotFoundError:
            return None

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the visible blocks after the local hit; the last token is left to compute."""
        self._local_tokens[request.request_id] = num_computed_tokens
        if not self._kv_transfer_config.is_kv_consumer or request.skip_reading_prefix_cache:
            return 0, False
        first = index = num_computed_tokens // self._block_size
        limit = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        while index < limit and self._reference(request.block_hashes[index].hex()).exists():
            index += 1
        return (index - first) * self._block_size, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Start over with an admitted request, and plan the load that was granted."""
        table = blocks.get_block_ids()[0]
        doubtful = not self._suspects.isdisjoint(table)
        self._progress[request.request_id] = Progress(request, table, doubtful=doubtful)
        if num_external_tokens == 0:
            return
        lost = self._fail.pop(request.request_id, set())
        first = self._local_tokens[request.request_id] // self._block_size
        for index in range(first, first + num_external_tokens // self._block_size):
            key = request.block_hashes[index].hex()
            # A missing reference is met like a missing file, as a load that fails.
            entry = self._entry(key) or str(self._store / "missing")
            self._next.loads.append((entry, table[index]))
            self._last_loaded[table[index]] = key
            tokens = range(index * self._block_size, (index + 1) * self._block_size)
            if lost is None or not lost.isdisjoint(tokens):
                shutil.rmtree(entry, ignore_errors=True)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan the saves of the blocks that are full and final after this step."""
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        for req_id, count in scheduler_output.num_scheduled_tokens.items():
            progress, tables = self._progress[req_id], state.get_block_ids(req_id)
            assert tables is not None
            progress.blocks = tables[0]
            if progress.doubtful or not self._kv_transfer_config.is_kv_producer:
                continue
            request = progress.request
            # Placeholders and drafts are computed tokens, but not yet known ones.
            final = min(request.num_computed_tokens + count, request.num_tokens)
            for index in range(progress.next_block, final // self._block_size):
                progress.next_block = index + 1
                key = request.block_hashes[index].hex()
                if not self._reference(key).exists():
                    entry = self._store / f"{key[:16]}-{uuid.uuid4().hex}"
                    depends_on = frozenset(progress.blocks[: index + 1])
                    self._drafts[str(entry)] = Draft(key, depends_on)
                    self._next.saves.append((str(entry), progress.blocks[index]))
        metadata, self._next = self._next, LayerMetadata()
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Throw away what rests on failed loads, and make complete entries visible."""
        invalid = connector_output.invalid_block_ids
        if invalid:
            self._suspects |= invalid
            for progress in self._progress.values():
                progress.doubtful |= not invalid.isdisjoint(progress.blocks)
            for block_id in invalid & self._last_loaded.keys():
                self._forget(self._last_loaded.pop(block_id))
            for entry, draft in list(self._drafts.items()):
                if not invalid.isdisjoint(draft.depends_on):
                    del self._drafts[entry]
                    self._next.deletes.append(entry)
        saved = connector_output.kv_connector_worker_meta
        for entry, ranks in saved.ranks.items() if isinstance(saved, SavedEntries) else ():
            if entry in self._drafts:
                self._drafts[entry].ranks += ranks
                if self._drafts[entry].ranks == self._world_size:
                    part = self._store / f"{uuid.uuid4().hex}.part"
                    part.write_text(Path(entry).name)
                    os.replace(part, self._reference(self._drafts.pop(entry).key))

    def _forget(self, key: str) -> None:
        """Make an entry invisible; the workers delete its files after the loads before."""
        if (entry := self._entry(key)) is not None:
            self._next.deletes.append(entry)
            self._reference(key).unlink()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let the blocks go: their saves ended with the steps that they belonged to."""
        for by_request in (self._progress, self._local_tokens, self._fail):
            by_request.pop(request.request_id, None)
        if self._suspects:
            in_use = (progress.blocks for progress in self._progress.values())
            self._suspects.intersection_update(set().union(*in_use))
        return False, None

    def reset_cache(self) -> bool | None:
        """Make everything invisible, also what is being saved or was computed before."""
        for path in (self._store / "references").iterdir():
            self._forget(path.name)
        self._next.deletes.extend(self._drafts)
        self._drafts.clear()
        for progress in self._progress.values():
            progress.doubtful = True
        return True

    def kvconform_fail_load(self, req_id: str, positions: set[int] | None = None) -> None:
        """Lose the files of these token positions when the request's next load is planned."""
        self._fail[req_id] = None if positions is None else set(positions)

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the layers by name; the first dimension has to be the block."""
        for name, cache in kv_caches.items():
            if cache.device.type != "cpu":
                raise ValueError("LayerFuturesConnector supports KV caches on the CPU")
            if len(cache) != self._kv_cache_config.num_blocks:
                raise ValueError(f"the first dimension of {name} is not the block")
        self._caches = kv_caches

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Submit the load of each layer; vLLM calls this before a pass that needs it."""
        metadata = cast(LayerMetadata, self._get_connector_metadata())
        for entry in metadata.deletes:
            shutil.rmtree(Path(entry, self._rank), ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(entry)  # The last rank finds it empty.
        if metadata.loads:
            for name in self._caches:
                self._loads[name] = self._pool.submit(self._load_layer, name, metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until the layer is there, or is known to have failed."""
        if layer_name in self._loads:
            self._loads[layer_name].result()

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Submit the save of the layer, which has been computed."""
        metadata = cast(LayerMetadata, self._get_connector_metadata())
        if not metadata.saves or layer_name not in self._caches:
            return
        if layer_name in self._saves:
            self._saves[layer_name].result()  # Layers of a draft model run several times.
        self._saves[layer_name] = self._pool.submit(self._save_layer, layer_name, metadata.saves)

    def wait_for_save(self) -> None:
        """Wait for all layers; an entry counts if all of them were written."""
        layers, self._saves = self._saves, {}
        written = [future.result() for future in layers.values()]
        if layers.keys() == self._caches.keys():
            self._saved.update(set.intersection(*written))

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report the entries that this rank has written."""
        saved, self._saved = self._saved, Counter()
        return SavedEntries(saved) if saved else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report the blocks of which at least one layer could not be read."""
        loads, self._loads = self._loads, {}
        return set().union(*(future.result() for future in loads.values()))

    def shutdown(self) -> None:
        """End the threads; no future outlives its step."""
        if self.role == KVConnectorRole.WORKER:
            self._pool.shutdown(wait=True)

    def _save_layer(self, name: str, saves: list[tuple[str, int]]) -> set[str]:
        """Write one layer of all entries of the step, and say which were written."""
        written = set()
        for entry, block_id in saves:
            path = Path(entry, self._rank, f"{name}.pt")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save({"layer": name, "kv": self._caches[name][block_id].clone()}, path)
                written.add(entry)
            except (OSError, RuntimeError) as error:
                logger.warning("layer %s of block %d was not saved: %s", name, block_id, error)
        return written

    def _load_layer(self, name: str, loads: list[tuple[str, int]]) -> set[int]:
        """Read one layer of all entries of the step, and say which blocks failed."""
        failed = set()
        for entry, block_id in loads:
            try:
                content = torch.load(Path(entry, self._rank, f"{name}.pt"), weights_only=True)
                self._caches[name][block_id].copy_(content["kv"])
            except Exception as error:
                logger.warning("layer %s of block %d was not loaded: %s", name, block_id, error)
                failed.add(block_id)
        return failed


def _engine_name(vllm_config: VllmConfig, block_size: int) -> str:
    """Name the folder of all engines whose entries have the same meaning and shape."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ranks = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    dtypes = (str(model.dtype), vllm_config.cache_config.cache_dtype)
    identity = repr((model.model, model.revision, dtypes, block_size, ranks))
    return hashlib.sha256(identity.encode()).hexdigest()[:16]
