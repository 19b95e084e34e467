# SPDX-License-Identifier: Apache-2.0
"""The requests of a worker, and the model that it runs.

A batch is built from SchedulerOutputs alone, as a model runner builds its own. The model computes
no attention: what it samples is a function of the KV that was read. A case's script decides which
drafts are accepted and where a request stops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvconform.compat.step import REPEATED_TOKEN, STOP_TOKEN
from kvconform.kernels.codes import CodeBook, mix64
from kvconform.kv.cache import Group
from kvconform.kv.oracle import slots_of
from kvconform.kv.provenance import Chain, Identity, extend

FIRST_TOKEN = 2
VOCABULARY = 50_000


def sample(chain: Chain, corruption: int = 0) -> int:
    """Return the next token, a function of the KV that was read.

    That is the last content id of `chain`, and `corruption`, a digest of the bytes that were wrong.
    """
    last = chain.ids[-1] if chain.ids else 0
    return FIRST_TOKEN + mix64(last ^ corruption) % VOCABULARY


@dataclass
class Script:
    """What a case says about the output of one request.

    `drafts`: accepted drafts per verification; the last entry repeats. `stop_at`: output index of
    the stop token. `repeats_at`: that from which one token repeats. `verified` counts the
    verifications.
    """

    drafts: list[int] = field(default_factory=list)
    stop_at: int | None = None
    repeats_at: int | None = None
    verified: int = 0

    def accepted(self, drafts: int) -> int:
        """Return how many of `drafts` draft tokens are accepted; advance the script."""
        if not drafts:
            return 0
        plan = 0
        if self.drafts:
            plan = self.drafts[min(self.verified, len(self.drafts) - 1)]
        self.verified += 1
        return min(plan, drafts)

    def token(self, chain: Chain, prompt_len: int, corruption: int = 0) -> int:
        """Return the next token of `chain`, which is the stop token where the script says so."""
        if self.stop_at is not None and len(chain.ids) - prompt_len == self.stop_at:
            return STOP_TOKEN
        if self.repeats_at is not None and len(chain.ids) - prompt_len >= self.repeats_at:
            return REPEATED_TOKEN
        return sample(chain, corruption)


@dataclass
class WorkerRequest:
    """A request as the worker knows it.

    `chain` has the contents of all known tokens, sampled ones included. `tables` are the block
    tables, one per group. Blocks that have left a window stay in them and are never read, as in
    vLLM's worker. `listed` are the lists of a SchedulerOutput that are extended with the tables.
    `valid_end` is the end of the final KV. `newest` is the column of the block table with the
    recurrent state behind it; None: that of the block which ends there or later. `is_pooling`: it
    ends with a vector for its prompt.
    """

    chain: Chain
    prompt_len: int
    script: Script
    tables: list[list[int]] = field(default_factory=list)
    listed: Sequence[list[int]] = ()
    valid_end: int = 0
    newest: int | None = None
    in_batch: bool = False
    is_pooling: bool = False
    _encoded: np.ndarray | None = None
    _encoded_ids: list[int] = field(default_factory=list)

    @property
    def table(self) -> list[int]:
        """Block table of the first group."""
        return self.tables[0]

    def expected(self, book: CodeBook, end: int) -> np.ndarray:
        """Return the rows [end, layers, heads, width] that positions [0, end) must hold (nonce 0).

        Encodes only what is new since the last call.
        """
        ids = self.chain.ids
        known = self._encoded_ids
        same = min(len(known), len(ids))
        # Ids are chained: equal ids at one position mean equal ids before it.
        while same and known[same - 1] != ids[same - 1]:
            same -= 1
        if same < len(ids) or self._encoded is None:
            fresh = book.rows(self.chain.array(same, len(ids)))
            if self._encoded is not None:
                fresh = np.concatenate([self._encoded[:same], fresh])
            self._encoded = fresh
            self._encoded_ids = list(ids)
        return self._encoded[:end]


@dataclass
class Row:
    """One request in one step, which computes its positions [start, start + count).

    The last `drafts` of these are drafts, of which `accepted` hold. `by_group`: their slots [count]
    in each group's blocks; of recurrent layers, the slots [1 + drafts] of the states behind the
    last tokens. `samples`: whether the row reaches the end of the known tokens. `before`: the end
    of the final KV before the step. `newest`: see WorkerRequest.

    The states are where vLLM has them (v1/worker/mamba_utils.py): the one behind the last token
    that is no draft in the column of the step's last token, and behind each draft in the next
    column. When the drafts are verified, the one at the end of a full block is copied there.
    """

    state: WorkerRequest
    start: int
    count: int
    drafts: int
    accepted: int
    draft_ids: list[int]
    by_group: list[np.ndarray]
    samples: bool
    before: int
    newest: int | None = None

    @property
    def slots(self) -> np.ndarray:
        """Slots [count] in the first group's blocks."""
        return self.by_group[0]

    @property
    def known(self) -> int:
        """End of the positions that hold accepted tokens after this step."""
        return self.start + self.count - (self.drafts - self.accepted)

    def state_before(self, size: int) -> int:
        """Return the column of the state before `start`, which is not 0; `size`: of a block."""
        return (self.start - 1) // size if self.newest is None else self.newest

    def first_state(self, size: int) -> int:
        """Return the column of the first state that the step writes."""
        return _last_column(self.start + self.count, size)

    def copied_state(self, size: int) -> tuple[int, int] | None:
        """Return the columns from and to which a state is copied after the verification, if any."""
        first, known = self.start + self.count - self.drafts, self.known
        end = known - known % size
        source, target = self.first_state(size) + end - first, end // size - 1
        return (source, target) if end >= first and source != target else None

    def last_state(self, size: int) -> int:
        """Return the column of the state behind the last known token, after `copied_state`."""
        copied = self.copied_state(size)
        column = self.first_state(size)
        in_place = copied is not None and copied[1] == column
        return column if in_place else column + self.accepted

    def content(self) -> np.ndarray:
        """Return the content ids [count] that this step writes."""
        accepted = self.state.chain.ids[self.start : self.known]
        return np.array(accepted + self.draft_ids, dtype=np.uint64)


Lookup = Callable[[str], tuple[int, Identity, Script]]


class Batch:
    """Persistent requests of one worker.

    `lookup(req_id)` returns what the harness knows of a request: incarnation, identity and script.
    `groups`: the model's KV cache groups; one with blocks of `block_size` if none are given.
    `extends_lists`: append new blocks to the lists of the SchedulerOutput that listed the request
    first, as model runner V1 does in the scheduler's own process
    (v1/worker/gpu_model_runner.py: GPUModelRunner._update_states).
    """

    def __init__(
        self,
        block_size: int,
        lookup: Lookup,
        groups: Sequence[Group] = (),
        *,
        extends_lists: bool = False,
    ) -> None:
        self.lookup = lookup
        self.extends_lists = extends_lists
        self.sizes = [group.block_size for group in groups] or [block_size]
        self.recurrent = [group.recurrent for group in groups] or [False]
        # Tokens per block of recurrent layers, which all have the same.
        self._state_size = next((group.block_size for group in groups if group.recurrent), None)
        self.requests: dict[str, WorkerRequest] = {}

    def update(self, output: Any) -> None:
        """Apply a SchedulerOutput: finished, new, resumed and running requests."""
        # Finished ids go first, because an id may be reused at once.
        for req in output.finished_req_ids:
            self.requests.pop(req, None)
        for new in output.scheduled_new_reqs:
            self._start(new)
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", ())
        for index, req in enumerate(cached.req_ids):
            state = self.requests[req]
            blocks = cached.new_block_ids[index]
            if req in resumed:
                self._give(state, blocks)
                state.valid_end = cached.num_computed_tokens[index]
                state.newest = None
                tokens = cached.all_token_ids.get(req)
                if tokens is not None:
                    self._align(state, list(tokens))
                    continue
            else:
                for tables in (state.tables, state.listed):
                    for table, more in zip(tables, blocks or (), strict=False):
                        table += more
            # Forget the outputs that the engine dropped.
            state.chain.truncate(state.prompt_len + cached.num_output_tokens[index])

    def _start(self, new: Any) -> None:
        generation, identity, script = self.lookup(new.req_id)
        # vLLM's Request has zeros in place of embeddings.
        prompt = new.prompt_token_ids
        if prompt is None:
            prompt = [0] * len(new.prompt_embeds)
        elif (is_id := getattr(new, "prompt_is_token_ids", None)) is not None:
            prompt = [token if known else 0 for token, known in zip(prompt, is_id, strict=True)]
        tokens = getattr(new, "prefill_token_ids", None) or prompt
        known = self.requests.get(new.req_id)
        # Under the V2 runner's protocol, a resumed request is listed as a new one.
        if known is not None and known.chain.generation == generation:
            known.chain.identity = identity  # a session's next input may have images
            self._align(known, list(tokens))
            known.prompt_len = len(prompt)  # a session's output becomes a part of its prompt
            self._give(known, new.block_ids)
            known.valid_end = new.num_computed_tokens
            known.newest = None
            return
        state = WorkerRequest(Chain(new.req_id, generation, identity), len(prompt), script)
        for token in tokens:
            state.chain.append(token)
        self._give(state, new.block_ids)
        state.valid_end = new.num_computed_tokens
        state.is_pooling = getattr(new, "pooling_params", None) is not None
        self.requests[new.req_id] = state

    def _give(self, state: WorkerRequest, blocks: Sequence[list[int]]) -> None:
        state.tables = [list(table) for table in blocks]
        if self.extends_lists:
            state.listed = blocks

    @staticmethod
    def _align(state: WorkerRequest, tokens: list[int]) -> None:
        known = state.chain.tokens
        same = 0
        while same < min(len(tokens), len(known)) and tokens[same] == known[same]:
            same += 1
        state.chain.truncate(same)
        for token in tokens[same:]:
            state.chain.append(token)

    def rows(self, output: Any) -> list[Row]:
        """Return the rows of this step, in the order of the SchedulerOutput.

        Decides which drafts are accepted, and appends their tokens.
        """
        starts = {n.req_id: n.num_computed_tokens for n in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        rows = []
        for req, count in output.num_scheduled_tokens.items():
            state = self.requests[req]
            drafts = len(output.scheduled_spec_decode_tokens.get(req, ()))
            # The worker knows rejections that the scheduler has not processed yet.
            start = min(starts[req], state.valid_end)
            padded = req not in cached.req_ids or not state.in_batch
            rows.append(self._row(state, start, count, drafts, padded=padded))
        scheduled = set(output.num_scheduled_tokens)
        for req, state in self.requests.items():
            state.in_batch = req in scheduled
        return rows

    def _row(
        self, state: WorkerRequest, start: int, count: int, drafts: int, *, padded: bool
    ) -> Row:
        chain = state.chain
        known = start + count - drafts
        if known > len(chain.ids):
            raise RuntimeError(
                f"harness: request {chain.req} is to compute position {known - 1},"
                f" but only {len(chain.ids)} tokens are known"
            )
        samples = known == len(chain.ids)
        accepted = 0
        draft_ids = []
        if drafts and samples:
            accepted = 0 if padded else state.script.accepted(drafts)
            for _ in range(accepted):
                chain.append(state.script.token(chain, state.prompt_len))
            last = chain.ids[-1]
            for index in range(drafts - accepted):
                extra = chain.identity.extra(len(chain.ids) + index) ^ 0xD8AF7
                last = extend(last, 7 + index, extra)
                draft_ids.append(last)
        end = start + count
        stride = max(self.sizes)
        slots = []
        for size, table, recurrent in zip(self.sizes, state.tables, self.recurrent, strict=True):
            if recurrent:
                column = _last_column(end, size)
                slots.append(np.array(table[column : column + 1 + drafts], dtype=np.int64) * stride)
            else:
                slots.append(slots_of(table, start, end, size, stride))
        row = Row(
            state,
            start,
            count,
            drafts,
            accepted,
            draft_ids,
            slots,
            samples,
            before=state.valid_end,
            newest=state.newest,
        )
        if self._state_size is not None:
            state.newest = row.last_state(self._state_size)
        return row


def _last_column(end: int, size: int) -> int:
    """Return the column of a block table with the last of `end` tokens; `size`: of a block."""
    return -(-end // size) - 1


@dataclass
class Info:
    """What the harness knows about one incarnation of a request."""

    name: str
    generation: int
    identity: Identity
    script: Script
