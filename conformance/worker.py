# SPDX-License-Identifier: Apache-2.0
"""The worker half of an engine: paged cache, provenance-writing model, and the connector's worker half."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvconform.batch import Batch, Row
from kvconform.compat import ModelRunnerOutput, torch
from kvconform.grants import slots_of
from kvconform.kvcache import PagedCache
from kvconform.oracle import OWN, Oracle
from kvconform.provenance import Origin, Registry
from kvconform.trace import Trace


class AttentionMetadata(SimpleNamespace):
    """What this model passes as a layer's `attn_metadata`: slot_mapping [tokens] int64, query_start_loc [reqs + 1], seq_lens [reqs],
    block_table [reqs, blocks], num_actual_tokens."""


class Worker:
    """Executes SchedulerOutputs. `computed(ids)` tells the harness which content ids now exist in an engine's cache.

    `execute` changes the cache, the batch and the trace.
    """

    def __init__(
        self,
        cache: PagedCache,
        registry: Registry,
        trace: Trace,
        oracle: Oracle,
        batch: Batch,
        computed: Callable[[list[int], list[int]], None],
    ):
        self.cache, self.registry, self.trace, self.oracle, self.batch = cache, registry, trace, oracle, batch
        self.computed = computed
        self.rows: list[Row] = []
        self.fresh: list[tuple[int, str]] = []
        nothing: np.ndarray = np.empty(0, dtype=np.int64)
        self._written, self._read, self._ends, self._encoded, self._expected = nothing, nothing, nothing, nothing, nothing
        self._corruption: dict[str, int] = {}
        self._nonce = 0
        self.order = 0
        self.scheduled: set[str] = set()
        self._poison(0, "the null block")

    # -- poison ----------------------------------------------------------------------------------------------------------------
    def _poison(self, block: int, owner: str) -> None:
        size = self.cache.block_size
        slots = np.arange(block * size, (block + 1) * size)
        content = self.registry.poison(block, owner)
        rows = self.cache.book.rows(np.array([content], dtype=np.uint64))
        for layer in range(len(self.cache.tensors)):
            self.cache.write(layer, slots, np.repeat(rows[:, layer], size, axis=0))
        self.oracle.emptied(slots)

    def poison_fresh(self) -> None:
        """Poison the blocks that this step's schedule handed out. Runs after handle_preemptions returned, before any load or write."""
        self.oracle.check_writes("handle_preemptions")
        for block, owner in self.fresh:
            self._poison(block, owner)
            self.trace.emit("block", op="poison", id=block, group=0, owner=owner, hashed=False, ref=1, in_flight=False)
        self.fresh = []

    # -- one step --------------------------------------------------------------------------------------------------------------
    def begin(self, output: Any, fresh: list[tuple[int, str]]) -> None:
        """Take over a SchedulerOutput; afterwards `rows` says what the forward pass computes."""
        self.fresh = fresh
        self.batch.update(output)
        self.rows = self.batch.rows(output)
        self._nonce = (self._nonce + 1) & 0xFFFF
        self._corruption = {}
        self.order = 0
        contents = []
        for row in self.rows:
            content = row.content()
            contents.append(content)
            chain = row.state.chain
            for offset, value in enumerate(content.tolist()):
                pos = row.start + offset
                if pos < row.known:
                    self.registry.note(value, Origin("token", chain.req, chain.generation, pos, chain.plain[pos], chain.tokens[pos]))
                else:
                    self.registry.note(value, Origin("draft", chain.req, chain.generation, pos))
        if output.total_num_scheduled_tokens:
            size = self.cache.block_size
            self._written = np.concatenate([row.slots for row in self.rows])
            self._encoded = self.cache.book.rows(np.concatenate(contents), self._nonce)
            self._read = np.concatenate([slots_of(row.state.table, 0, row.known, size) for row in self.rows])
            self._expected = np.concatenate([row.state.expected(self.cache.book, row.known) for row in self.rows])
            self._ends = np.cumsum([row.known for row in self.rows])

    def attention_metadata(self) -> tuple[dict[str, AttentionMetadata], dict[str, Any]]:
        """(attn_metadata, slot_mapping) by layer name, as the forward context carries them."""
        slots = np.concatenate([row.slots for row in self.rows])
        width = max(len(row.state.table) for row in self.rows)
        table: np.ndarray = np.zeros((len(self.rows), width), dtype=np.int32)
        for index, row in enumerate(self.rows):
            table[index, : len(row.state.table)] = row.state.table
        mapping = torch.from_numpy(slots)
        metadata = AttentionMetadata(
            slot_mapping=mapping,
            num_actual_tokens=len(slots),
            query_start_loc=torch.tensor([0, *np.cumsum([row.count for row in self.rows]).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor([row.start + row.count for row in self.rows], dtype=torch.int32),
            block_table=torch.from_numpy(table),
        )
        return {name: metadata for name in self.cache.names}, {name: mapping for name in self.cache.names}

    def write_layer(self, layer: int) -> None:
        """The KV update of one layer: this step's tokens go to their slots (before the layer's loads are waited for, as in vLLM)."""
        self.cache.write(layer, self._written, self._encoded[:, layer])
        if layer == 0:
            for row in self.rows:
                self.oracle.filled(row.slots, OWN, f"{row.state.chain.req}#{row.state.chain.generation}")

    def read_layer(self, layer: int) -> None:
        """The attention of one layer: read every known position through the block tables; wrong bytes change the sampled token."""
        wrong = self.cache.mismatches(layer, self._read, self._expected[:, layer])
        by_row: dict[int, list[int]] = {}
        for index in wrong.tolist():
            by_row.setdefault(int(np.searchsorted(self._ends, index, side="right")), []).append(index)
        for number, indices in by_row.items():
            row = self.rows[number]
            first = int(self._ends[number]) - row.known
            for index in indices:
                self.oracle.wrong_read(layer, row.state.chain, index - first, int(self._read[index]))
            bytes_read = self.cache.read(layer, self._read[indices]).contiguous().numpy().tobytes()
            seed = self._corruption.get(row.state.chain.req, 0)
            self._corruption[row.state.chain.req] = seed ^ int.from_bytes(hashlib.sha256(bytes_read).digest()[:8], "little")

    @property
    def corrupt(self) -> set[str]:
        """Requests whose tokens of this step were sampled from wrong KV."""
        return set(self._corruption)

    def forward(self, attention: Callable[[str], None]) -> None:
        """All layers in order: KV update, then `attention(layer_name)`, which the life cycle wraps in the layer hooks."""
        for layer, name in enumerate(self.cache.names):
            self.oracle.check_writes("start_load_kv")
            self.write_layer(layer)
            attention(name)

    def attend(self, layer_name: str) -> None:
        """Body of the attention call: judge the connector's writes so far, then read."""
        self.oracle.check_writes("wait_for_layer_load")
        self.read_layer(self.cache.names.index(layer_name))

    def sample(self) -> ModelRunnerOutput:
        """Sample, advance the batch, and build the ModelRunnerOutput of a step with a forward pass."""
        ids: list[str] = []
        tokens: list[list[int]] = []
        for row in self.rows:
            chain, state = row.state.chain, row.state
            corrupt = self._corruption.get(chain.req, 0)
            ids.append(chain.req)
            state.valid_end = row.known
            end = len(chain.ids)
            self.trace.emit(
                "kv.computed", req=chain.req, generation=chain.generation, start=row.start, end=row.start + row.count,
                accepted=row.accepted, rejected=row.drafts - row.accepted,
            )  # fmt: skip
            self.computed(chain.ids[row.start : row.known], chain.plain[row.start : row.known])
            if not row.samples:
                tokens.append([])
                continue
            token = state.script.token(chain, state.prompt_len, corrupt)
            chain.append(token)
            tokens.append(chain.tokens[end - row.accepted :])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
