# SPDX-License-Identifier: Apache-2.0
"""The worker's view of requests: built from SchedulerOutput alone, as a model runner builds its own.

The model that computes no attention: which tokens a request samples, which drafts are accepted, where it stops.

What the harness tells an engine about its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvconform.compat.step import STOP_TOKEN
from kvconform.kernels.codes import CodeBook, mix64
from kvconform.kv.cache import Group
from kvconform.kv.oracle import slots_of
from kvconform.kv.provenance import Chain, Identity, extend

FIRST_TOKEN = 2
VOCABULARY = 50_000


def sample(chain: Chain, corruption: int = 0) -> int:
    """The next token: a function of the KV that was read (the last content id, and the digest of whatever bytes were wrong)."""
    return FIRST_TOKEN + mix64((chain.ids[-1] if chain.ids else 0) ^ corruption) % VOCABULARY


@dataclass
class Script:
    """What a case says about one request: accepted drafts per verification (the last repeats), output index of the stop token."""

    drafts: list[int] = field(default_factory=list)
    stop_at: int | None = None
    verified: int = 0

    def accepted(self, drafts: int) -> int:
        """How many of `drafts` draft tokens this verification accepts; advances the script."""
        if not drafts:
            return 0
        plan = self.drafts[min(self.verified, len(self.drafts) - 1)] if self.drafts else 0
        self.verified += 1
        return min(plan, drafts)

    def token(self, chain: Chain, prompt_len: int, corruption: int = 0) -> int:
        """The next token of `chain`, which is the stop token where the script says so."""
        if self.stop_at is not None and len(chain.ids) - prompt_len == self.stop_at:
            return STOP_TOKEN
        return sample(chain, corruption)


@dataclass
class WorkerRequest:
    """A request as the worker knows it: content chain (known tokens, sampled ones included), block table per group, end of the final KV.

    Entries of blocks that have left a window stay in the table, as in vLLM's worker: nobody reads them.
    """

    chain: Chain
    prompt_len: int
    script: Script
    tables: list[list[int]] = field(default_factory=list)
    valid_end: int = 0
    in_batch: bool = False
    _encoded: np.ndarray | None = None
    _encoded_ids: list[int] = field(default_factory=list)

    @property
    def table(self) -> list[int]:
        """Block table of the first group."""
        return self.tables[0]

    def expected(self, book: CodeBook, end: int) -> np.ndarray:
        """Rows [end, layers, heads, width] that positions [0, end) must hold (nonce 0). Encodes only what is new since the last call."""
        ids, known = self.chain.ids, self._encoded_ids
        same = min(len(known), len(ids))
        while (
            same and known[same - 1] != ids[same - 1]
        ):  # ids are chained: equal at one position means equal before it
            same -= 1
        if same < len(ids) or self._encoded is None:
            fresh = book.rows(self.chain.array(same, len(ids)))
            self._encoded = (
                fresh if self._encoded is None else np.concatenate([self._encoded[:same], fresh])
            )
            self._encoded_ids = list(ids)
        return self._encoded[:end]


@dataclass
class Row:
    """One request in one step: positions [start, start + count), of which the last `drafts` are drafts and `accepted` of those hold.

    `by_group`: their slots [count] in each group's blocks.
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

    @property
    def slots(self) -> np.ndarray:
        """Slots [count] in the first group's blocks."""
        return self.by_group[0]

    @property
    def known(self) -> int:
        """End of the positions that hold accepted tokens after this step."""
        return self.start + self.count - (self.drafts - self.accepted)

    def content(self) -> np.ndarray:
        """Content ids [count] that this step writes."""
        accepted = self.state.chain.ids[self.start : self.known]
        return np.array(accepted + self.draft_ids, dtype=np.uint64)


Lookup = Callable[[str], tuple[int, Identity, Script]]


class Batch:
    """Persistent requests of one worker. `lookup(req_id)` gives incarnation, identity and script of a request from the harness.

    `groups`: the model's KV cache groups, one with blocks of `block_size` if none are given.
    """

    def __init__(self, block_size: int, lookup: Lookup, groups: Sequence[Group] = ()) -> None:
        self.block_size, self.lookup = block_size, lookup
        self.sizes = [group.block_size for group in groups] or [block_size]
        self.recurrent = [group.recurrent for group in groups] or [False]
        self.requests: dict[str, WorkerRequest] = {}

    def update(self, output: Any) -> None:
        """Apply a SchedulerOutput: finished, new, resumed and running requests. Finished ids first: an id may be reused at once."""
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
                state.tables = _copied(blocks)
                state.valid_end = cached.num_computed_tokens[index]
                tokens = cached.all_token_ids.get(req)
                if tokens is not None:
                    self._align(state, list(tokens))
                    continue
            else:
                for table, more in zip(state.tables, blocks or (), strict=False):
                    table += more
            state.chain.truncate(
                state.prompt_len + cached.num_output_tokens[index]
            )  # outputs that the engine dropped

    def _start(self, new: Any) -> None:
        generation, identity, script = self.lookup(new.req_id)
        tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
        known = self.requests.get(new.req_id)
        if (
            known is not None and known.chain.generation == generation
        ):  # resumed under the V2 runner's protocol
            self._align(known, list(tokens))
            known.tables, known.valid_end = _copied(new.block_ids), new.num_computed_tokens
            return
        state = WorkerRequest(
            Chain(new.req_id, generation, identity), len(new.prompt_token_ids), script
        )
        for token in tokens:
            state.chain.append(token)
        state.tables, state.valid_end = _copied(new.block_ids), new.num_computed_tokens
        self.requests[new.req_id] = state

    @staticmethod
    def _align(state: WorkerRequest, tokens: list[int]) -> None:
        same = 0
        while (
            same < min(len(tokens), len(state.chain.tokens))
            and tokens[same] == state.chain.tokens[same]
        ):
            same += 1
        state.chain.truncate(same)
        for token in tokens[same:]:
            state.chain.append(token)

    def rows(self, output: Any) -> list[Row]:
        """The rows of this step, in the order of the SchedulerOutput; decides acceptance and appends accepted draft tokens."""
        starts = {n.req_id: n.num_computed_tokens for n in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        rows = []
        for req, count in output.num_scheduled_tokens.items():
            state = self.requests[req]
            drafts = len(output.scheduled_spec_decode_tokens.get(req, ()))
            start = min(
                starts[req], state.valid_end
            )  # the worker knows rejections that the scheduler has not processed yet
            rows.append(
                self._row(
                    state,
                    start,
                    count,
                    drafts,
                    padded=req not in cached.req_ids or not state.in_batch,
                )
            )
        scheduled = set(output.num_scheduled_tokens)
        for req, state in self.requests.items():
            state.in_batch = req in scheduled
        return rows

    def _row(
        self, state: WorkerRequest, start: int, count: int, drafts: int, *, padded: bool
    ) -> Row:
        chain, known = state.chain, start + count - drafts
        if known > len(chain.ids):
            raise RuntimeError(
                f"harness: request {chain.req} is to compute position {known - 1} but only {len(chain.ids)} tokens are known"
            )
        samples = known == len(chain.ids)
        accepted, draft_ids = 0, []
        if drafts and samples:
            accepted = 0 if padded else state.script.accepted(drafts)
            for _ in range(accepted):
                chain.append(state.script.token(chain, state.prompt_len))
            last = chain.ids[-1]
            for index in range(drafts - accepted):
                last = extend(
                    last, 7 + index, chain.identity.extra(len(chain.ids) + index) ^ 0xD8AF7
                )
                draft_ids.append(last)
        stride = max(self.sizes)
        slots = []
        for size, table, recurrent in zip(self.sizes, state.tables, self.recurrent, strict=True):
            found = slots_of(
                table, start + count - 1 if recurrent else start, start + count, size, stride
            )
            slots.append(found - found % stride if recurrent else found)
        return Row(
            state, start, count, drafts, accepted, draft_ids, slots, samples, before=state.valid_end
        )


def _copied(blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(table) for table in blocks]


@dataclass
class Info:
    """What the harness knows about one incarnation of a request."""

    name: str
    generation: int
    identity: Identity
    script: Script
