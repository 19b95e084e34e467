# SPDX-License-Identifier: Apache-2.0
"""The data that the probes of scheduler and workers keep and exchange.

It describes the requests of a running engine, the shape of its KV cache, the steps in flight, and
the note about a step that travels to the workers with the SchedulerOutput.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from kvconform.contract.case import GroupKind
from kvconform.contract.trace import Event
from kvconform.kv.cache import WHOLE, Group, Slice
from kvconform.kv.provenance import ROOT, Adapter, Chain, HandedOut, Identity, extend


@dataclass
class Known:
    """One incarnation of a request id.

    `valid_end`: end of its final KV, in tokens, after the steps that have landed. `named`: number
    of its blocks that were announced to the workers. `shared`: number of the block that the model
    computes only in part, if there is one. `remembered`: number of its positions in the
    run's memory. `tainted`: a load of it has failed since it was admitted.
    """

    generation: int
    identity: Identity
    chain: Chain = field(init=False)
    valid_end: int = 0
    named: int = 0
    shared: int | None = None
    remembered: int = 0
    tainted: bool = False

    def admitted(self, computed: int, size: int) -> None:
        """Reset it when the request is scheduled first, or again after a preemption.

        `computed`: tokens of its KV that the model did not compute for it. `size`: tokens per
        block.
        """
        self.valid_end = computed
        self.named = computed // size
        self.shared = self.named if computed % size else None
        self.tainted = False


def identity_of(request: Any, block_size: int = 0) -> Identity:
    """Return the identity of a vLLM request: salt, adapter, multi-modal items, embeddings.

    Embeddings are compared by block, as in vLLM's hashes, so two prompts may share their first
    blocks. `block_size`: tokens per block; 0 takes a prompt of embeddings as one block.
    """
    lora = getattr(request, "lora_request", None)
    items = _items(request)
    embeds = getattr(request, "prompt_embeds", None)
    if embeds is not None:
        size = block_size or len(embeds)
        for start in range(0, len(embeds), size):
            part = embeds[start : start + size]
            items.append({"at": start, "length": len(part), "id": f"embeds:{digest(part)}"})
    adapter = None if lora is None else Adapter.of(lora.lora_name, getattr(lora, "lora_path", None))
    return Identity.of(getattr(request, "cache_salt", None), adapter, items)


def described(request: Any) -> dict[str, Any]:
    """Return the fields of a request.identity event for a vLLM request.

    Embeddings are named by a digest.
    """
    lora = getattr(request, "lora_request", None)
    embeds = getattr(request, "prompt_embeds", None)
    adapter = None
    if lora is not None:
        path, number = getattr(lora, "lora_path", None), getattr(lora, "lora_int_id", None)
        adapter = {"name": lora.lora_name, "path": path, "number": number}
    return {
        "salt": getattr(request, "cache_salt", None),
        "adapter": adapter,
        "items": _items(request),
        "embeds": None if embeds is None else {"of": digest(embeds), "until": None, "then": None},
    }


def _items(request: Any) -> list[dict[str, Any]]:
    return [
        {
            "at": feature.mm_position.offset,
            "length": feature.mm_position.length,
            "id": feature.identifier,
        }
        for feature in getattr(request, "mm_features", None) or ()
    ]


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of the bytes of a tensor."""
    flat = tensor.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


class Roster:
    """All requests so far, by id. `block_size`: tokens per block."""

    def __init__(self, block_size: int = 0) -> None:
        self.block_size = block_size
        self.known: dict[str, Known] = {}

    def add(self, request: Any) -> None:
        """Add a new request. Its id may have been used before."""
        before = self.known.get(request.request_id)
        identity = identity_of(request, self.block_size)
        known = Known(0 if before is None else before.generation + 1, identity)
        known.chain = Chain(request.request_id, known.generation, known.identity)
        self.known[request.request_id] = known

    def cut_back(self, req: str, length: int) -> None:
        """Forget the tokens of a request from `length` on: its session goes on with others."""
        known = self.known[req]
        known.chain.truncate(length)
        known.valid_end = min(known.valid_end, length)
        known.remembered = min(known.remembered, length)

    def extended(self, request: Any) -> None:
        """Note the multi-modal items of a session's next input."""
        known = self.known[request.request_id]
        known.identity = known.chain.identity = identity_of(request, self.block_size)

    def generation(self, req: str) -> int:
        """Return the incarnation of a request id; 0 for an unknown id.

        A connector may report any id.
        """
        known = self.known.get(req)
        return 0 if known is None else known.generation

    def identity(self, req: str) -> Identity:
        """Return what distinguishes the request's KV from that of the same tokens elsewhere."""
        known = self.known.get(req)
        return Identity() if known is None else known.identity

    def chain(self, request: Any) -> tuple[list[int], list[int]]:
        """Return content ids, and ids under no identity, of the request's known tokens.

        Updates the chain that is kept for the request.
        """
        chain = self.known[request.request_id].chain
        tokens = request.all_token_ids
        chain.truncate(len(tokens))
        for position in range(len(chain.tokens), len(tokens)):
            chain.append(tokens[position])
        return chain.ids, chain.plain

    def alone(self, request: Any, index: int) -> int:
        """Return an id of one whole block of a request, whatever is before it.

        It is that of the block's tokens under the request's identity.
        """
        chain = self.known[request.request_id].chain
        found = ROOT
        for position in range(index * self.block_size, (index + 1) * self.block_size):
            found = extend(found, chain.tokens[position], chain.identity.own(position))
        return found


ATTRIBUTE = "kvconform_note"
"""Attribute of a SchedulerOutput that holds the StepNote; it is pickled with the output."""


@dataclass
class Named:
    """A block whose KV, computed by the model, is final.

    `content`: the content id of its last token. `plain`: the id of the same tokens under no
    identity. `req`, `index`: the request, and the number of the block there. `upon`: ids of the
    request's blocks before it. `alone`: see Roster.
    """

    block: int
    content: int
    plain: int
    req: str
    index: int
    upon: tuple[int, ...] = ()
    alone: int = 0


@dataclass
class Granted:
    """A load that the engine granted in this step: positions [start, end) of a request.

    `table`: the request's whole block table. `contents`: (content id, plain id) of every block that
    the request's known tokens fill, from the first. `alone`: see Roster, of each of
    them. `known`: number of the request's tokens.
    """

    transfer: str
    req: str
    generation: int
    start: int
    end: int
    is_async: bool
    table: list[int]
    contents: list[tuple[int, int]] = field(default_factory=list)
    alone: list[int] = field(default_factory=list)
    known: int = 0


@dataclass
class StepNote:
    """One step.

    `step`: number of schedule() calls so far. `digest`: digest of the connector's metadata.
    `fresh`: blocks allocated since the step before, each with its request. `wanted`: the content id
    of the last token that such a block is to hold, if its request's known tokens fill it. `zeroed`:
    those of them that the engine itself clears. `unseen`: content ids of blocks that became final
    and are not `named`, because not only the model wrote them or they are freed. `written`: blocks
    that the model may write. `tables`: the blocks of every request that holds blocks. `scheduled`:
    the requests that compute.
    """

    step: int
    digest: str | None = None
    named: list[Named] = field(default_factory=list)
    unseen: list[int] = field(default_factory=list)
    granted: list[Granted] = field(default_factory=list)
    fresh: list[HandedOut] = field(default_factory=list)
    wanted: dict[int, int] = field(default_factory=dict)
    zeroed: list[int] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    tables: dict[str, list[int]] = field(default_factory=dict)
    scheduled: list[str] = field(default_factory=list)


def note_of(output: Any) -> StepNote | None:
    """Return the note of a SchedulerOutput; None if it has none."""
    return getattr(output, ATTRIBUTE, None)


@dataclass
class Shape:
    """The shape of a KV cache, in the terms of kvconform.kv.cache.

    `names`: the layers, in the order of their numbers. `drafts`: see PagedCache; 0 if no layer is
    recurrent.
    """

    num_blocks: int
    groups: tuple[Group, ...]
    names: list[str]
    share: Slice = WHOLE
    drafts: int = 0
    group_of: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.group_of = np.zeros(self.num_blocks, dtype=np.int64)

    @property
    def block_size(self) -> int:
        """Tokens per block of the first group."""
        return self.groups[0].block_size


def shape_of(config: Any) -> Shape:
    """Return the shape of a vLLM KVCacheConfig. Unknown kinds of groups count as full."""
    names: list[str] = []
    groups = []
    drafts = 0
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        drafts = max(drafts, getattr(spec, "num_speculative_blocks", 0))
        window = getattr(spec, "sliding_window", None)
        local = "ChunkedLocal" in type(spec).__name__
        layers = tuple(range(len(names), len(names) + len(group.layer_names)))
        names += group.layer_names
        transfer = bool(getattr(group, "enable_kv_transfer", True))
        kind: GroupKind
        if local:
            kind, window = "local", spec.attention_chunk_size
        elif window:
            kind = "sliding"
        elif "Mamba" in type(spec).__name__:
            kind = "state"
        else:
            kind = "full" if transfer else "private"
        heads = getattr(spec, "num_kv_heads", 1)
        groups.append(Group(kind, layers, spec.block_size, heads, window, transfer))
    return Shape(config.num_blocks, tuple(groups), names, drafts=drafts)


@dataclass
class Share:
    """A request's share of a step in flight.

    `start`: its first position, as the scheduler counts. `count`: its tokens. `drafts`: the drafts
    among them. `event`: its req.scheduled event. `fresh`: the step admitted the request.
    """

    req: str
    start: int
    count: int
    drafts: int
    event: Event
    fresh: bool


class Flight(NamedTuple):
    """A step that was scheduled and has not landed: its SchedulerOutput, note and shares."""

    output: Any
    note: StepNote
    shares: list[Share]
