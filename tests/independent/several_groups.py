# SPDX-License-Identifier: Apache-2.0
"""A disk store for models with several KV cache groups.

Every KV block of every group is one file, named by the group and by the hash that vLLM gives
the last token of the block, which covers all that precedes it. Blocks are written in the step
that completes them, and what is left when a request finishes while its blocks are held. A prefix
is offered only if each group has what a continuation reads: all blocks for full attention, and
those of the window for sliding window attention. Loads are synchronous: they are done before the
forward pass of the step that needs them, and a load that fails ends the step with an error.

The option ``path`` is the folder of the store, shared by all ranks and by later engines. A reset
of the cache begins a new generation of files; older ones are never read again.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    group_kernel_blocks,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

NULL_BLOCK = 0


class Copy(NamedTuple):
    """One block of one group, to be copied between the KV cache and its file."""

    group: int
    key: str
    block_id: int


@dataclass
class CopiesMetadata(KVConnectorMetadata):
    """What the workers do in one step: loads before it, saves after it."""

    folder: str
    loads: list[Copy] = field(default_factory=list)
    saves: list[Copy] = field(default_factory=list)
    # The saves of finished requests, whose blocks are held until then.
    last_saves: dict[str, list[Copy]] = field(default_factory=dict)


class Group(NamedTuple):
    """What the scheduler half knows of a KV cache group."""

    number: int
    block_size: int
    hashes: int  # Hashes per block; the finest group has one.
    window: int | None  # Tokens before the next one that are needed; None stands for all.
    drafts: bool  # Layers of a draft model see one token more than the hash covers.


class SeveralGroupsConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the blocks of all KV cache groups in files."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Prepare the half that ``role`` names."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._rank = vllm_config.parallel_config.rank
        self._world_size = vllm_config.parallel_config.world_size
        self._layers: list[dict[str, torch.Tensor]] = []
        if role is not KVConnectorRole.SCHEDULER:
            return
        self._groups = self._describe_groups()
        self._store = self._open_store()
        self._begin_generation(max((int(path.name) for path in self._store.iterdir()), default=0))
        self._requests: dict[str, Request] = {}
        self._local_tokens: dict[str, int] = {}
        # Per request and group: how many leading blocks have been taken care of.
        self._progress: dict[str, list[int]] = {}
        self._loads: list[Copy] = []
        self._last_saves: dict[str, list[Copy]] = {}

    def _describe_groups(self) -> list[Group]:
        """Return the groups, or refuse a model that this connector cannot serve."""
        parallel = self._vllm_config.parallel_config
        if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
            raise ValueError("SeveralGroupsConnector does not support context parallelism.")
        self._alignment, hash_size = resolve_kv_cache_block_sizes(
            self._kv_cache_config, self._vllm_config
        )
        groups = []
        for index in self._kv_cache_config.transfer_group_ids:
            group = self._kv_cache_config.kv_cache_groups[index]
            spec = group.kv_cache_spec
            window: int | None = None
            if type(spec) is SlidingWindowSpec:
                window = spec.sliding_window - 1 + spec.extra_retained_tokens
            elif type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
                raise ValueError(
                    "SeveralGroupsConnector supports full attention and sliding window "
                    f"attention, but group {index} has a {type(spec).__name__}."
                )
            hashes = spec.block_size // hash_size
            groups.append(Group(index, spec.block_size, hashes, window, group.is_eagle_group))
        return groups

    def _open_store(self) -> Path:
        """Return the folder for this model, cache layout and parallelism."""
        path = self._kv_transfer_config.get_from_extra_config("path", None)
        if not path:
            raise ValueError("SeveralGroupsConnector needs 'path' in kv_connector_extra_config.")
        model, cache = self._vllm_config.model_config, self._vllm_config.cache_config
        parallel = self._vllm_config.parallel_config
        identity = repr(
            (
                (model.model, model.revision, str(model.dtype), cache.cache_dtype),
                (parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
                [(g.layer_names, g.kv_cache_spec) for g in self._kv_cache_config.kv_cache_groups],
            )
        )
        store = Path(path) / hashlib.sha256(identity.encode()).hexdigest()[:16]
        store.mkdir(parents=True, exist_ok=True)
        return store

    def _begin_generation(self, number: int) -> None:
        """Use this generation of files from the next step on."""
        self._generation = number
        self._folder = self._store / str(number)
        self._folder.mkdir(exist_ok=True)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is a later miss, and the engine does not wait for it."""
        return False

    # ---- The scheduler half ----

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Offer the longest prefix for which each group has the blocks that will be read."""
        self._local_tokens[request.request_id] = num_computed_tokens
        if request.skip_reading_prefix_cache:
            return 0, False
        limit = request.num_tokens - 1
        for group in self._groups:
            if group.window is None:
                limit = min(limit, self._stored_prefix(request, group, num_computed_tokens))
        limit -= limit % self._alignment
        for hit in range(limit, num_computed_tokens, -self._alignment):
            if all(
                self._window_is_stored(request, group, num_computed_tokens, hit)
                for group in self._groups
                if group.window is not None
            ):
                return hit - num_computed_tokens, False
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of an admitted request, and follow what it computes."""
        self._requests[request.request_id] = request
        self._progress[request.request_id] = [0] * len(self._kv_cache_config.kv_cache_groups)
        local = self._local_tokens.pop(request.request_id, 0)
        if num_external_tokens == 0:
            return
        table = blocks.get_block_ids()
        hit = local + num_external_tokens
        for group in self._groups:
            for index in range(local // group.block_size, hit // group.block_size):
                block_id = table[group.number][index]
                if block_id != NULL_BLOCK:
                    self._loads.append(Copy(group.number, key_of(request, group, index), block_id))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan the saves of this step: blocks of known tokens, neither drafts nor placeholders."""
        meta = CopiesMetadata(str(self._folder), self._loads, [], self._last_saves)
        self._loads, self._last_saves = [], {}
        state = scheduler_output.kv_connector_block_state
        assert state is not None, "the scheduler always offers its block tables"
        for req_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[req_id]
            final = min(request.num_computed_tokens + num_scheduled, request.num_tokens)
            table = state.get_block_ids(req_id)
            meta.saves += self._plan_saves(request, final, table)
        return meta

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Save what the groups still hold and no step has saved, while the blocks are held.

        The slot of the last token may hold a rejected draft; steps in flight do not count.
        """
        self._local_tokens.pop(request.request_id, None)
        if self._requests.pop(request.request_id, None) is None:
            return False, None
        settled = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        final = min(settled, max(request.num_prompt_tokens, request.num_tokens - 1))
        saves = self._plan_saves(request, final, block_ids)
        del self._progress[request.request_id]
        if saves:
            self._last_saves[request.request_id] = saves
        return bool(saves), None

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same for one group: MultiConnector calls this if a child has no group support."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        """Forget all that is stored; steps in flight still use the older files."""
        self._begin_generation(self._generation + 1)
        self._last_saves = {req_id: [] for req_id in self._last_saves}
        return True

    def _plan_saves(self, request: Request, final: int, table: tuple[list[int], ...]) -> list[Copy]:
        """Return the blocks among the first ``final`` tokens that are held and not stored."""
        saves = []
        progress = self._progress[request.request_id]
        for group in self._groups:
            start = min(progress[group.number], request.num_computed_tokens // group.block_size)
            end = min(final // group.block_size, len(table[group.number]))
            for index in range(start, end):
                block_id = table[group.number][index]
                if block_id != NULL_BLOCK and not self._is_stored(request, group, index):
                    saves.append(Copy(group.number, key_of(request, group, index), block_id))
            progress[group.number] = max(start, end)
        return saves

    def _stored_prefix(self, request: Request, group: Group, num_computed_tokens: int) -> int:
        """Return the end of the stored blocks that follow the local prefix without a gap."""
        index = num_computed_tokens // group.block_size
        while self._is_stored(request, group, index):
            index += 1
        return (index - group.drafts) * group.block_size

    def _window_is_stored(self, request: Request, group: Group, local: int, hit: int) -> bool:
        """Return whether the blocks that the token after ``hit`` sees are stored or local."""
        assert group.window is not None
        first = max(local, hit - group.window) // group.block_size
        end = hit // group.block_size + group.drafts
        return all(self._is_stored(request, group, index) for index in range(first, end))

    def _is_stored(self, request: Request, group: Group, index: int) -> bool:
        """Return whether all ranks have written this block."""
        if (index + 1) * group.hashes > len(request.block_hashes):
            return False
        key = key_of(request, group, index)
        return all(
            file_of(str(self._folder), rank, group.number, key).exists()
            for rank in range(self._world_size)
        )

    # ---- The worker half ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep a view of each layer whose first dimension is the block."""
        num_blocks = self._kv_cache_config.num_blocks
        self._layers = [
            {name: blocks_of(kv_caches[name], num_blocks) for name in group.layer_names}
            for group in self._kv_cache_config.kv_cache_groups
        ]

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load all that this step reads; an error here ends the step."""
        meta = self._get_copies()
        for copy in meta.loads:
            tensors = load_file(file_of(meta.folder, self._rank, copy.group, copy.key))
            for name, layer in self._layers[copy.group].items():
                block = layer[copy.block_id]
                block.copy_(tensors[name].view(block.shape))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers are loaded before the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are saved when all layers have been computed."""

    def wait_for_save(self) -> None:
        """Write the blocks that this step has completed."""
        self._write(self._get_copies().folder, self._get_copies().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Write the last blocks of finished requests and let their blocks go."""
        meta = self._get_copies()
        for saves in meta.last_saves.values():
            self._write(meta.folder, saves)
        return set(meta.last_saves), None

    def _get_copies(self) -> CopiesMetadata:
        """Return the metadata of this step."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, CopiesMetadata)
        return meta

    def _write(self, folder: str, saves: list[Copy]) -> None:
        """Write blocks; a file appears under its name when it is complete."""
        for copy in saves:
            path = file_of(folder, self._rank, copy.group, copy.key)
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.{os.getpid()}.part")
            layers = self._layers[copy.group]
            blocks = {name: dense_copy(layer[copy.block_id]) for name, layer in layers.items()}
            try:
                save_file(blocks, part)
                part.replace(path)
            except (OSError, SafetensorError):  # the disk is full: a later lookup misses
                part.unlink(missing_ok=True)


def blocks_of(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """View a layer with the engine's blocks first, each with its tokens in their order.

    Attention may work on parts of a block: then [blocks, parts, heads, tokens, values] becomes
    [blocks, heads, parts, tokens, values], whose bytes are those of a whole block.
    """
    grouped = group_kernel_blocks(cache, num_blocks)
    return grouped if grouped.dim() == cache.dim() else grouped.movedim(1, -3)


def dense_copy(block: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, in the order of its dimensions whatever the cache's is."""
    return block.cpu().clone(memory_format=torch.contiguous_format)


def key_of(request: Request, group: Group, index: int) -> str:
    """Return the hash of everything up to the end of a block of a group."""
    return str(request.block_hashes[(index + 1) * group.hashes - 1].hex())


def file_of(folder: str, rank: int, group: int, key: str) -> Path:
    """Return where a rank keeps a block."""
    return Path(folder, f"rank{rank}", key[:2], f"{key}-{group}.safetensors")
