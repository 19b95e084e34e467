# SPDX-License-Identifier: Apache-2.0
"""The reference connector for models with several KV cache groups (`SupportsHMA`).

An example is a model with full attention and a sliding window. Each group has its own block table,
block size and stored entries: a chunk is stored once per group, under the chunk's key and the
group's number. The table of a group with a window has the null block (0) where the window has
passed: there, nothing can be saved, and nothing needs to be loaded. So a hit needs all chunks of
the groups without a window, and of the other groups the chunks within the last window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec

from kvconform.refimpl.connector import Finish, Lookup, ReferenceConnector
from kvconform.refimpl.paging import NULL_BLOCK
from kvconform.refimpl.plan import Load, Piece, Save, cut
from kvconform.refimpl.telemetry import COUNTERS
from kvconform.refimpl.tracking import Tracked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass(frozen=True)
class Part:
    """A group that is transferred: its number, tokens per block, and window in tokens.

    `window` is None for full attention. `recurrent`: a block holds one state, after its last token,
    and the table has blocks only where a state was kept. `local`: the windows are chunks that begin
    at the multiples of `window`.
    """

    number: int
    block_size: int
    window: int | None
    recurrent: bool = False
    local: bool = False

    @property
    def slots_per_block(self) -> int:
        """Slots of a block: those of its tokens, or the one of its state."""
        return 1 if self.recurrent else self.block_size

    def key(self, chunk: str) -> str:
        """Return the key of this group's share of a chunk."""
        return f"{chunk}.{self.number}"

    def first_wanted(self, end: int) -> int:
        """Return the first position that has KV when the tokens [0, end) are computed.

        Blocks before it are null.
        """
        if self.window is None:
            return 0
        skipped = max(0, end - self.window + 1)
        if self.local:
            skipped = end // self.window * self.window
        return skipped // self.block_size * self.block_size


@dataclass(frozen=True)
class Share(Piece):
    """One group's part of a chunk; its slots count in blocks of that group.

    For a recurrent group, the slots are block ids.
    """

    part: Part

    def blocks(self, block_size: int) -> set[int]:
        return {slot // self.part.slots_per_block for slot in self.slots}


class HybridConnector(ReferenceConnector, SupportsHMA):
    """The reference connector for any number of groups."""

    several_groups = True

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.options.async_saves:
            raise ValueError(
                "async_saves is not supported: "
                "blocks that leave a window are freed without notice to the connector"
            )
        groups = kv_cache_config.kv_cache_groups
        self._parts = [
            _part(number, group.kv_cache_spec, self._share.ranks)
            for number, group in enumerate(groups)
            if getattr(group, "enable_kv_transfer", True)
        ]
        chunk = self.options.chunk_tokens
        if any(part.recurrent and part.block_size != chunk for part in self._parts):
            raise ValueError(
                "chunk_tokens must be the block size: "
                "recurrent layers keep their state only at the end of a block"
            )
        block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self._block_size = math.lcm(*block_sizes) * self._share.ranks
        self._several = len(groups) > 1
        # The group number of each layer of this rank.
        self._number = {
            name: number for number, group in enumerate(groups) for name in group.layer_names
        }
        # The engine's block tables, while metadata is built.
        self._state: Any = None
        # Requests whose asynchronous load failed: to be reported.
        self._failed: set[str] = set()

    # -- Scheduler half

    def _stored_prefix(self, request: Request) -> int:
        keys = self._keys(request, [], request.num_tokens)
        unlimited = [part for part in self._parts if part.window is None]
        missing = (
            index
            for index, key in enumerate(keys)
            if not all(self._store.has(part.key(key)) for part in unlimited)
        )
        return next(missing, len(keys)) * self.options.chunk_tokens

    def _claim(self, request: Request, found: int) -> int:
        """Return the longest claim for which every window is stored."""
        if any(part.recurrent for part in self._parts):
            # The engine computes the last token again; the state must be the one before it.
            found = min(found, request.num_tokens - 1)
        end = super()._claim(request, found)
        keys = self._keys(request, [], request.num_tokens)
        while end > 0 and not all(self._is_filled(part, keys, end) for part in self._parts):
            end -= end % self._block_size or self._block_size  # back to a block boundary
        return end

    def _is_filled(self, part: Part, keys: Sequence[str], end: int) -> bool:
        """Return whether the store has what the group needs for the tokens [0, end)."""
        if part.recurrent and end % part.block_size:
            return False  # there is no state inside a block
        chunk = self.options.chunk_tokens
        wanted = keys[part.first_wanted(end) // chunk : -(-end // chunk)]
        return all(self._store.has(part.key(key)) for key in wanted)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._tracked[request.request_id].tables = _copied(blocks.get_block_ids())

    def _plan_saves(self, scheduler_output: SchedulerOutput) -> Iterator[Save]:
        self._state = getattr(scheduler_output, "kv_connector_block_state", None)
        self._count_offers()
        yield from super()._plan_saves(scheduler_output)
        self._state = None  # valid only during the call

    def _count_offers(self) -> None:
        """Count the states that the engine offers; saves take them from the tables."""
        offers = getattr(self._state, "boundary_state_offloads", {})
        if offered := sum(map(len, offers.values())):
            self._count("states_offered", offered)

    def _extend_table(
        self, tracked: Tracked, new_blocks: Sequence[Sequence[int]] | None, replaces: bool
    ) -> None:
        """Take the request's tables from the engine, or extend them.

        The step's output shows only added blocks. It does not show blocks that left a window: they
        may belong to another request already.
        """
        now = None
        if self._state is not None:
            now = self._state.get_block_ids(tracked.request.request_id)
        if now is not None:
            tracked.tables = _copied(now)
        elif replaces:
            tracked.tables = _copied(new_blocks or ())
        elif new_blocks is not None:
            for table, more in zip(tracked.tables, new_blocks, strict=True):
                table += more

    def _plan_load(self, tracked: Tracked, granted: int, is_async: bool) -> Load:
        load = super()._plan_load(tracked, granted, is_async)
        wanted = (self._inside(piece) for piece in self._shares(tracked, load.start, load.end))
        return replace(load, pieces=tuple(piece for piece in wanted if piece.slots))

    def _inside(self, share: Share) -> Share:
        """Return the part of the share after its null blocks."""
        null = sum(slot // share.part.slots_per_block == NULL_BLOCK for slot in share.slots)
        return replace(share, first=share.first + null, slots=share.slots[null:])

    def _plan_save(self, tracked: Tracked, end: int, scheduled: int, final: bool = False) -> Save:
        save = super()._plan_save(tracked, end, scheduled, final)
        table = {
            block
            for part in self._parts
            for block in tracked.tables[part.number][: -(-save.end // part.block_size)]
        }
        return replace(save, table=tuple(sorted(table)) if save.pieces else ())

    def _pieces(self, tracked: Tracked, start: int, end: int) -> tuple[Piece, ...]:
        return tuple(
            share
            for share in self._shares(tracked, start, end)
            if NULL_BLOCK not in share.blocks(self._block_size)
        )

    def _expect(self, tracked: Tracked, pieces: Sequence[Piece]) -> bool:
        return bool(pieces)  # no KV events

    def _shares(self, tracked: Tracked, start: int, end: int) -> Iterator[Share]:
        """Yield the shares of all groups in the chunks of the positions [start, end)."""
        chunk = self.options.chunk_tokens
        keys = self._keys(tracked.request, tracked.keys, -(-end // chunk) * chunk)
        for part in self._parts:
            table = tracked.tables[part.number]
            if part.recurrent:
                for number in range(start // chunk, end // chunk):
                    yield Share(part.key(keys[number]), 0, (table[number],), part)
            else:
                for piece in cut(keys, table, start, end, chunk, part.block_size):
                    yield Share(part.key(piece.key), piece.first, piece.slots, part)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> Finish:
        """Do what `request_finished` does; called instead of it, with one table per group."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            tracked.tables = _copied(block_ids)
        return self.request_finished(request, list(block_ids[0]))

    # -- Worker half

    def _load(self, load: Load, layers: Iterable[str]) -> None:
        bad = set(self._bad)
        super()._load(load, layers)
        if self._several and self._invalid:
            # A block id is ambiguous without its group: report the request instead.
            self._failed.add(load.req)
            self._invalid.clear()
            if load.is_async:
                self._bad = bad  # no KV was computed from the blocks

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._failed
        self._failed = set()
        return results

    def _load_counted(self, piece: Piece, layer: str) -> bool:
        assert isinstance(piece, Share)
        if self._number[layer] != piece.part.number:
            return True  # the layer is of another group
        return super()._load_counted(piece, layer)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load the recurrent layers, even where others are loaded in the layer hooks.

        vLLM calls these for attention only.
        """
        super().start_load_kv(forward_context, **kwargs)
        if not self.options.layerwise:
            return
        recurrent = {part.number for part in self._parts if part.recurrent}
        layers = [name for name in self._layers if self._number[name] in recurrent]
        for load in self._metadata().loads:
            if layers and not load.is_async:
                self._load(load, layers)

    def _save_layer(self, epoch: int, save: Save, layer: str, kv_layer: torch.Tensor) -> None:
        mine = tuple(
            piece
            for piece in save.pieces
            if isinstance(piece, Share) and self._number[layer] == piece.part.number
        )
        super()._save_layer(epoch, replace(save, pieces=mine), layer, kv_layer)

    @classmethod
    def kvconform_capabilities(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        found = super().kvconform_capabilities(extra_config) | {"kv_events": False}
        if cls is HybridConnector:
            found["metrics"] = COUNTERS | {"states_offered": ["states_offered"]}
        return found


def _part(number: int, spec: Any, ranks: int) -> Part:
    """Return the group of this specification; the tokens of a block are split over `ranks`."""
    recurrent = isinstance(spec, MambaSpec)
    # A recurrent layer needs the state before a token: a window of two.
    window = 2 if recurrent else getattr(spec, "sliding_window", None)
    local = isinstance(spec, ChunkedLocalAttentionSpec)
    if local:
        window = spec.attention_chunk_size
    return Part(number, spec.block_size * ranks, window, recurrent, local)


def _copied(tables: Iterable[Sequence[int]]) -> list[list[int]]:
    return [list(table) for table in tables]


class Divergent(HybridConnector):
    """Completes the local hit of the full attention, where the recurrent state's is shorter.

    A load always ends with the state, so nothing else is to be done.
    """

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return True


class OneGroupOnly(HybridConnector):
    """Accepts a model with several groups, as it must, but loads nothing for it."""

    kvconform_capabilities = None  # type: ignore[assignment]

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Lookup:
        if self._several:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)
