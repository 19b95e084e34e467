# SPDX-License-Identifier: Apache-2.0
"""The worker of one rank: a model that writes provenance codes to a KV cache, and checks them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvconform.compat.attention import Attended
from kvconform.compat.step import runner_output
from kvconform.compat.vllm_api import ModelRunnerOutput, torch
from kvconform.contract.trace import Trace
from kvconform.engine.batch import Batch, Row
from kvconform.kv import device
from kvconform.kv.cache import Group, PagedCache
from kvconform.kv.content import Content
from kvconform.kv.oracle import EXTERNAL, OWN, Fill, Oracle, slots_of
from kvconform.kv.provenance import HandedOut, Memory, Origin, Registry


@dataclass
class Written:
    """KV of one layer that the forward pass wrote: slots [n], and their content before [n, ...]."""

    layer: int
    slots: np.ndarray
    before: torch.Tensor


class Overlap:
    """The forward pass that is still running when the next step's hooks are called.

    Asynchronous scheduling has it so on a GPU. The engine judges a step when it is over. What the
    step wrote is then taken back out of the device's memory, and written again where the compute
    stream gets to it: after the next step's hooks have looked, and before that step's own forward
    pass. A connector that copies KV of the previous step without waiting for the compute stream
    gets the older bytes.

    This is done only if nothing could have observed the end of the step: no host thread waited for,
    or polled, a point in the compute stream after the start of the forward pass, and no other
    stream waited for one. Events that were recorded there are reached later, too.

    On a device whose compute stream is not slow, nothing is kept and nothing is taken back.
    """

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self.device = device.current
        self._written: list[Written] = []
        self._held: set[int] = set()  # blocks
        self._began = 0

    def begin(self) -> None:
        """Note that a forward pass begins."""
        self._written = []
        self._began = self.device.position()

    def note(self, layer: int, slots: np.ndarray) -> None:
        """Keep the content of slots [n]; to be called right before they are written."""
        if self.device.overlaps:
            self._written.append(Written(layer, slots, self.cache.peek(layer, slots)))

    def take_back(self) -> None:
        """Make the step unfinished again; to be called when it has been judged.

        Changes the cache's tensors, not its shadow.
        """
        written = self._written
        self._written = []
        if not written:
            return
        # A thread of the connector's must not find events reached and the older bytes.
        with self.device.exclusive():
            if not self.device.unseen(self._began):
                return
            for part in written:
                now = self.cache.peek(part.layer, part.slots)
                self.cache.poke(part.layer, part.slots, part.before)
                self.device.launch(partial(self.cache.poke, part.layer, part.slots, now))
                self._held.update((part.slots // self.cache.stride).tolist())
            self.device.launch(self._held.clear)
            self.device.postpone(self._began)

    def holds(self, blocks: list[int]) -> bool:
        """Return whether one of `blocks` is part of what was taken back."""
        return not self._held.isdisjoint(blocks)

    @property
    def pending(self) -> bool:
        """Whether writes are taken back now."""
        return bool(self._held)


@dataclass
class Reads:
    """What one group's layers write and read in a step, with the requests one after the other.

    `written`: slots [tokens] that are written. `source`: which of the step's rows go there.
    `slots`: slots [n] that are read. `expected`: the content [n] that they must hold. `ends`: the
    end of each request in n. `tops`: the end of the positions that each request reads.
    """

    written: np.ndarray
    source: np.ndarray | slice
    slots: np.ndarray
    expected: Content
    ends: np.ndarray
    tops: list[int]


class Worker:
    """Executor of SchedulerOutputs on one rank.

    `memory` notes the content ids that now exist in an engine's cache. A step changes the memory,
    the cache, the batch and the trace.
    """

    def __init__(
        self,
        cache: PagedCache,
        registry: Registry,
        trace: Trace,
        oracle: Oracle,
        batch: Batch,
        memory: Memory,
    ):
        self.cache = cache
        self.registry = registry
        self.pool = registry.new_pool()
        self.trace = trace
        self.oracle = oracle
        self.batch = batch
        self.memory = memory
        self.device = device.current
        self.overlap = Overlap(cache)
        self.rows: list[Row] = []
        self.fresh: list[HandedOut] = []
        self._copies: Sequence[tuple[int, int]] = ()
        self._computed = Content.of(cache.book, np.empty(0, dtype=np.uint64))
        self._reads: list[Reads] = []
        self._corruption: dict[str, int] = {}
        self.outdated: set[str] = set()
        """Requests of the step that are gone, if the connector's cache was reset since the step was
        scheduled."""
        self.failing: set[str] = set()
        """Requests whose load was made to fail."""
        self.unsound: dict[int, int] = {}
        """Rows that have read memory that a failed load has not filled, in this step, and the first
        layer whose attention has. -1: that of an earlier stage."""
        self._nonce = 0
        self.scheduled: set[str] = set()
        self._poison([HandedOut(0, "the null block")])

    # -- poison
    def _poison(self, fresh: list[HandedOut]) -> None:
        if len(fresh) > len({each.block for each in fresh}):
            # A block was handed out twice: poison one after the other.
            for each in fresh:
                self._poison([each])
            return
        contents = [
            self.registry.poison(each.block, each.owner, self.pool, each.positions)
            for each in fresh
        ]
        content = Content.of(self.cache.book, np.array(contents, dtype=np.uint64))
        blocks = np.array([each.block for each in fresh], dtype=np.int64)
        groups = self.cache.group_of[blocks]
        for number in range(len(self.cache.groups)):
            mine = np.flatnonzero(groups == number)
            if len(mine):
                self.oracle.emptied(self.cache.poison(number, blocks[mine], content, mine))
        # A load on another stream may begin as soon as the blocks have an owner.
        self.device.settle()

    def poison_fresh(self) -> None:
        """Poison the blocks that this step's schedule handed out.

        To be called after handle_preemptions returned, and before any load or write.
        """
        self.oracle.check_writes("handle_preemptions")
        if not self.overlap.pending or self.overlap.holds([each.block for each in self.fresh]):
            # Poison is not work of a step: a load on another stream may begin as soon as the new
            # owner has the blocks.
            self.device.finish()
        if self.fresh:
            self._poison(self.fresh)
        for block, owner, _ in self.fresh:
            self.trace.emit(
                "block",
                op="poison",
                id=block,
                owner=owner,
                ref=1,
                in_flight=False,
            )
        owners = {block: owner for block, owner, _ in self.fresh}
        self.fresh = []
        if self._copies:
            self.device.launch(self._copy_blocks)
        for _, target in self._copies:
            self.trace.emit(
                "block", op="copy", id=target, owner=owners.get(target), ref=1, in_flight=False
            )

    def _copy_blocks(self) -> None:
        """Copy the blocks that a prefix-cache hit ends in: their requests write to the copies."""
        for source, target in self._copies:
            self._copy_block(source, target)

    def _copy_block(self, source: int, target: int) -> None:
        self.oracle.copied(*self.cache.copy_block(source, target))

    # -- one step
    def begin(self, output: Any, fresh: list[HandedOut]) -> None:
        """Take over a SchedulerOutput. Afterwards, `rows` is what the forward pass computes."""
        self.fresh = fresh
        self._copies = getattr(output, "kv_cache_block_copies", None) or ()
        self.batch.update(output)
        self.rows = self.batch.rows(output)
        self._nonce = (self._nonce + 1) & 0xFFFF
        self._corruption = {}
        self.unsound = {}
        contents = []
        for row in self.rows:
            content = row.content()
            contents.append(content)
            chain = row.state.chain
            self.registry.computes(chain)
            for offset, value in enumerate(content.tolist()):
                pos = row.start + offset
                if pos < row.known:
                    plain = chain.plain[pos]
                    token = chain.tokens[pos]
                    own = chain.identity.own(pos)
                    origin = Origin("token", chain.req, chain.generation, pos, plain, token, own)
                else:
                    origin = Origin("draft", chain.req, chain.generation, pos)
                self.registry.note(value, origin)
        if output.total_num_scheduled_tokens:
            self._computed = Content.of(self.cache.book, np.concatenate(contents), self._nonce)
            self._reads = [
                self._reads_of(number, group) for number, group in enumerate(self.cache.groups)
            ]

    def _reads_of(self, number: int, group: Group) -> Reads:
        stride = self.cache.stride
        book = self.cache.book
        recurrent = group.recurrent
        spans = [
            (row, group.first_read(row.start), row.start if recurrent else row.known)
            for row in self.rows
        ]
        if recurrent:
            blocks = [
                row.state.tables[number][row.state_before(group.block_size)]
                for row, lo, hi in spans
                if hi > lo
            ]
            slots = np.array(blocks, dtype=np.int64) * stride
        else:
            slots = np.concatenate(
                [
                    slots_of(row.state.tables[number], lo, hi, group.block_size, stride)
                    for row, lo, hi in spans
                ]
            )
        return Reads(
            written=np.concatenate([row.by_group[number] for row in self.rows]),
            source=self._states() if recurrent else slice(None),
            slots=slots,
            expected=Content(
                lambda: np.concatenate([row.state.chain.array(lo, hi) for row, lo, hi in spans]),
                lambda: np.concatenate(
                    [row.state.expected(book, row.known)[lo:hi] for row, lo, hi in spans]
                ),
            ),
            ends=np.cumsum([hi - lo for _, lo, hi in spans]),
            tops=[hi for _, _, hi in spans],
        )

    def _states(self) -> np.ndarray:
        """Return the step's tokens that have a state of their own: the drafts, and one before."""
        tops = np.cumsum([row.count for row in self.rows])
        return np.concatenate(
            [np.arange(top - 1 - row.drafts, top) for row, top in zip(self.rows, tops, strict=True)]
        )

    def attention_metadata(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (attn_metadata, slot_mapping) by layer name, as the forward context holds them."""
        made = [self._metadata_of(number, group) for number, group in enumerate(self.cache.groups)]
        by_name = {
            name: made[self.cache.group(layer)] for layer, name in enumerate(self.cache.names)
        }
        return by_name, {name: metadata.slot_mapping for name, metadata in by_name.items()}

    def _metadata_of(self, number: int, group: Group) -> Any:
        slots = np.concatenate([row.by_group[number] for row in self.rows])
        tables = [row.state.tables[number] for row in self.rows]
        table: np.ndarray = np.zeros((len(self.rows), max(map(len, tables))), dtype=np.int32)
        for index, blocks in enumerate(tables):
            table[index, : len(blocks)] = blocks
        starts = np.cumsum([0, *(row.count for row in self.rows)], dtype=np.int32)
        lengths = np.array([row.start + row.count for row in self.rows], dtype=np.int32)
        attended = Attended(
            slots=self.cache.mapping(slots, group),
            starts=starts,
            lengths=lengths,
            table=self.cache.kernel_table(table),
        )
        return attended.latent_metadata() if group.kind == "latent" else attended.metadata()

    def write_layer(self, layer: int) -> None:
        """Run the KV update of one layer: write this step's tokens to their slots.

        As in vLLM, that is before the layer's loads are waited for.
        """
        number = self.cache.group(layer)
        if not self.cache.groups[number].recurrent:  # `read_layer` reads a state, then updates it
            self._update(layer, number)

    def _update(self, layer: int, number: int) -> None:
        """Launch the KV update of a layer, which runs when the compute stream gets there."""
        self.device.launch(
            partial(self._write, layer, number), lambda _: self._written(layer, number)
        )

    def _write(self, layer: int, number: int) -> None:
        group = self.cache.groups[number]
        reads = self._reads[number]
        if not group.transfer:
            # The engine regenerates this KV from that of the layers that are transferred.
            self.cache.write(layer, reads.slots, reads.expected)
        elif not group.recurrent:
            self.overlap.note(layer, reads.written)
        computed = self._computed
        if self.unsound and not group.recurrent:
            computed = self._with_unsound(layer)
        self.cache.write(layer, reads.written, computed, reads.source)

    def rest_upon(self, earlier: Worker, *, same_stage: bool) -> None:
        """Take over which rows an earlier rank of this step has computed upon a failed load.

        Ranks of one stage add up their attention after each layer.
        """
        for row, layer in earlier.unsound.items():
            self._note_unsound(row, layer if same_stage else -1)

    def _note_unsound(self, row: int, layer: int) -> None:
        self.unsound[row] = min(layer, self.unsound.get(row, layer))

    def _with_unsound(self, layer: int) -> Content:
        """Return what a step writes to a layer, where attention to garbage has changed some rows.

        The KV of a layer is made of the attention of the layers before it.
        """
        ids = self._computed.ids.copy()
        ends = np.cumsum([row.count for row in self.rows])
        for number in sorted(row for row, since in self.unsound.items() if since < layer):
            content = [self.registry.unsound(each) for each in self.rows[number].content().tolist()]
            end = int(ends[number])
            ids[end - len(content) : end] = content
        return Content.of(self.cache.book, ids, self._nonce)

    def _rests_on_failure(self, layer: int, slots: np.ndarray) -> bool:
        """Return whether any of the slots is one that a failed load should have filled.

        Or one that was computed upon one.
        """
        dim = self.cache.book.head_dim
        for row in self.cache.read(layer, slots).numpy():
            value = self.cache.book.read_print(row[0, :dim])
            hit = None if value is None else self.registry.decode(value)
            origin = None if hit is None else self.registry.origins[hit[0]]
            if origin is not None and (
                origin.kind == "unsound" or (origin.kind == "poison" and origin.req in self.failing)
            ):
                return True
        return False

    def _written(self, layer: int, number: int) -> None:
        if layer == self.cache.groups[number].layers[0]:
            for row in self.rows:
                chain = row.state.chain
                self.oracle.filled(row.by_group[number], OWN, Fill((chain.req, chain.generation)))

    def read_layer(self, layer: int) -> None:
        """Run the attention of one layer: read known positions through the block tables.

        A layer with a window reads those of its window, any other reads all. Wrong bytes change the
        sampled token.
        """
        number = self.cache.group(layer)
        reads = self._reads[number]
        self.device.launch(
            lambda: self.cache.differing(layer, reads.slots, reads.expected),
            lambda found: self._judge(layer, reads, found),
        )
        if self.cache.groups[number].recurrent:
            self._update(layer, number)

    def _judge(self, layer: int, reads: Reads, found: torch.Tensor) -> None:
        wrong = found.cpu().numpy()
        if self.cache.tolerance:
            self._restore(layer, reads, wrong)
        by_row: dict[int, list[int]] = {}
        for index in np.flatnonzero(wrong).tolist():
            number = int(np.searchsorted(reads.ends, index, side="right"))
            by_row.setdefault(number, []).append(index)
        for number, indices in by_row.items():
            chain = self.rows[number].state.chain
            offset = reads.tops[number] - int(reads.ends[number])  # from an index to a position
            for index in indices:
                self.oracle.wrong_read(layer, chain, index + offset, int(reads.slots[index]))
            if self.failing and self._rests_on_failure(layer, reads.slots[indices]):
                self._note_unsound(number, layer)
            if layer == self.cache.drafter:
                continue  # wrong drafts are rejected
            bytes_read = self.cache.read(layer, reads.slots[indices]).contiguous().numpy().tobytes()
            digest = int.from_bytes(hashlib.sha256(bytes_read).digest()[:8], "little")
            self._corruption[chain.req] = self._corruption.get(chain.req, 0) ^ digest

    def _restore(self, layer: int, reads: Reads, wrong: np.ndarray) -> None:
        """Write exactly what a lossy connector has loaded of chunks that this step goes on with.

        A chunk that is stored again as a whole must be the same again. One that is stored with what
        is computed now may lose as much again: its tolerance is that of one pass. `wrong` [n] marks
        the slots that are beyond it. Changes the cache.
        """
        first = 0
        for row, end, top in zip(self.rows, reads.ends.tolist(), reads.tops, strict=True):
            begin = row.start - row.start % self.cache.chunk_tokens
            index = np.arange(max(first, begin - top + end), row.start - top + end)
            slots = reads.slots[index]
            loaded = (self.oracle.fill_kind[slots] == EXTERNAL) & ~wrong[index]
            self.cache.restore(layer, slots[loaded])
            first = end

    @property
    def corrupt(self) -> set[str]:
        """Requests whose tokens of this step were sampled from wrong KV."""
        return set(self._corruption)

    def forward(self, attention: Callable[[str], None]) -> None:
        """Run all layers in order: the KV update, then `attention(layer_name)`.

        `attention` calls `attend`; the life cycle wraps it in the layer hooks.
        """
        self.overlap.begin()
        self.oracle.check_writes("start_load_kv")
        for layer, name in enumerate(self.cache.names):
            if layer != self.cache.drafter:
                self.write_layer(layer)
                attention(name)

    def draft(self, attention: Callable[[str], None]) -> None:
        """Run the drafter's layer, if it has KV, on the same tokens as the model before it.

        Its KV, too, is a function of the tokens up to a position; vLLM's depends on the next one.
        """
        layer = self.cache.drafter
        if layer is not None:
            self.write_layer(layer)
            attention(self.cache.names[layer])

    def is_recurrent(self, layer_name: str) -> bool:
        """Return whether a layer is recurrent. vLLM calls layer hooks for attention only."""
        return self.cache.groups[self.cache.group(self.cache.names.index(layer_name))].recurrent

    def attend(self, layer_name: str) -> None:
        """Judge the connector's writes so far, then run the attention of a layer."""
        self.oracle.check_writes("wait_for_layer_load")
        layer = self.cache.names.index(layer_name)
        if self.device.shows_waits:
            self.device.launch(lambda: None, lambda _: self.oracle.reached(layer))
        self.read_layer(layer)

    def copy_states(self) -> None:
        """Copy the states at the ends of blocks that accepted drafts have filled to these blocks.

        To be called when the drafts are verified. Changes the cache.
        """
        for number, group in enumerate(self.cache.groups):
            for row in self.rows if group.recurrent else ():
                columns = row.copied_state(group.block_size)
                if columns is not None:
                    blocks = [row.state.tables[number][each] for each in columns]
                    self.device.launch(partial(self._copy_block, *blocks))

    def sample(self) -> ModelRunnerOutput:
        """Sample, advance the batch, and return the output of a step with a forward pass."""
        self.device.finish()
        ids: list[str] = []
        tokens: list[list[int]] = []
        vectors: list[torch.Tensor | None] = []
        for row in self.rows:
            chain = row.state.chain
            state = row.state
            corrupt = self._corruption.get(chain.req, 0)
            ids.append(chain.req)
            state.valid_end = row.known
            end = len(chain.ids)
            self.trace.emit(
                "kv.computed",
                req=chain.req,
                generation=chain.generation,
                start=row.start,
                end=row.start + row.count,
                accepted=row.accepted,
                rejected=row.drafts - row.accepted,
            )
            is_outdated = chain.req in self.outdated
            note = self.memory.outdated if is_outdated else self.memory.computed
            note(chain.ids[row.start : row.known], chain.plain[row.start : row.known])
            if not row.samples:
                tokens.append([])
                vectors.append(None)
                continue
            token = state.script.token(chain, state.prompt_len, corrupt)
            if state.is_pooling:
                vectors.append(torch.tensor([token], dtype=torch.float64))
                continue
            chain.append(token)
            tokens.append(chain.tokens[end - row.accepted :])
        is_pooling = any(row.state.is_pooling for row in self.rows)
        return runner_output(
            ids, () if is_pooling else tokens, vectors=vectors if is_pooling else ()
        )
