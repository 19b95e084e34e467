# SPDX-License-Identifier: Apache-2.0
"""What is known of the requests of a running engine: their incarnations, identities and content.

What the scheduler's side tells the workers about a step: it travels with the SchedulerOutput, also to other processes.

The shape of a running engine's KV cache, in the terms of kvconform.kv.cache.

What the scheduler's probe keeps of steps in flight: each request's share of them, and the loads under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvconform.contract.trace import Event
from kvconform.kv.cache import Group
from kvconform.kv.provenance import Chain, Identity


@dataclass
class Known:
    """One incarnation of a request id. `valid_end`: its KV is final up to there, as far as steps have landed; `named`: blocks that the
    workers were told of; `remembered`: positions that the run's memory has; `tainted`: a load of it failed since it was admitted.
    """

    generation: int
    identity: Identity
    chain: Chain = field(init=False)
    valid_end: int = 0
    named: int = 0
    remembered: int = 0
    tainted: bool = False

    def admitted(self, computed: int, size: int) -> None:
        """It is scheduled for the first time, or again after a preemption, with `computed` tokens of KV: the model did not write those."""
        self.valid_end, self.named, self.tainted = computed, -(-computed // size), False


def identity_of(request: Any) -> Identity:
    """The identity of a vLLM request: cache salt, adapter, multi-modal items."""
    lora = getattr(request, "lora_request", None)
    items = [
        {
            "at": feature.mm_position.offset,
            "length": feature.mm_position.length,
            "id": feature.identifier,
        }
        for feature in getattr(request, "mm_features", None) or ()
    ]
    return Identity.of(
        getattr(request, "cache_salt", None), None if lora is None else lora.lora_name, items
    )


class Roster:
    """All requests so far, by id."""

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}

    def add(self, request: Any) -> None:
        """A request comes; its id may have been another's before."""
        before = self.known.get(request.request_id)
        known = Known(0 if before is None else before.generation + 1, identity_of(request))
        known.chain = Chain(request.request_id, known.generation, known.identity)
        self.known[request.request_id] = known

    def generation(self, req: str) -> int:
        """Incarnation of a request id; 0 for one that nobody added: a connector may report anything."""
        known = self.known.get(req)
        return 0 if known is None else known.generation

    def identity(self, req: str) -> Identity:
        """What besides its tokens tells a request's KV apart."""
        known = self.known.get(req)
        return Identity() if known is None else known.identity

    def chain(self, request: Any) -> tuple[list[int], list[int]]:
        """Content ids, and ids under no identity, of a request's known tokens. Extends what is kept of them."""
        chain = self.known[request.request_id].chain
        tokens = request.all_token_ids
        chain.truncate(len(tokens))
        for position in range(len(chain.tokens), len(tokens)):
            chain.append(tokens[position])
        return chain.ids, chain.plain


ATTRIBUTE = "kvconform_note"
"""Where it hangs on a SchedulerOutput, whose pickle takes it along."""


@dataclass
class Named:
    """A block whose KV is final: what the model computed for a content id. `plain`: the id of the same tokens under no identity; `upon`:
    the blocks before it.
    """

    block: int
    content: int
    plain: int
    req: str
    index: int
    upon: tuple[int, ...] = ()


@dataclass
class Granted:
    """A load that the engine granted in this step: positions [start, end) of a request, whose whole block `table` is.

    `contents` are (content id, plain id) of every block of the request that its known tokens fill, from the first one on.
    """

    transfer: str
    req: str
    generation: int
    start: int
    end: int
    is_async: bool
    table: list[int]
    contents: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class StepNote:
    """One step. `step` counts schedule() calls; `digest` is that of the connector's metadata; `written` are blocks that the model may
    write; `fresh` the blocks handed out since the step before, and to whom, `zeroed` those of them that the engine itself clears;
    `tables` the blocks of every request that has some; `scheduled` the requests that compute.
    """

    step: int
    digest: str | None = None
    named: list[Named] = field(default_factory=list)
    granted: list[Granted] = field(default_factory=list)
    fresh: list[tuple[int, str]] = field(default_factory=list)
    zeroed: list[int] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    tables: dict[str, list[int]] = field(default_factory=dict)
    scheduled: list[str] = field(default_factory=list)


def note_of(output: Any) -> StepNote | None:
    """The note that hangs on a SchedulerOutput."""
    return getattr(output, ATTRIBUTE, None)


@dataclass
class Shape:
    """Blocks, and the groups of layers; what the observer asks of a cache. `names` are the layers, in the order of their numbers."""

    num_blocks: int
    groups: tuple[Group, ...]
    names: list[str]
    share: tuple[int, int] = (0, 1)
    group_of: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.group_of = np.zeros(self.num_blocks, dtype=np.int64)

    @property
    def block_size(self) -> int:
        """Tokens per block of the first group."""
        return self.groups[0].block_size


def shape_of(config: Any) -> Shape:
    """The shape that a KVCacheConfig stands for. Kinds of groups that are not known here count as full."""
    names: list[str] = []
    groups = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        window = getattr(spec, "sliding_window", None)
        layers = tuple(range(len(names), len(names) + len(group.layer_names)))
        names += group.layer_names
        transfer = bool(getattr(group, "enable_kv_transfer", True))
        kind: Any = (
            "sliding"
            if window
            else "state"
            if "Mamba" in type(spec).__name__
            else "full"
            if transfer
            else "private"
        )
        groups.append(
            Group(kind, layers, spec.block_size, getattr(spec, "num_kv_heads", 1), window, transfer)
        )
    return Shape(config.num_blocks, tuple(groups), names)


@dataclass
class Share:
    """A request's share of a step in flight: where it starts for the scheduler, tokens, drafts among them, its event; `fresh`: admitted."""

    req: str
    start: int
    count: int
    drafts: int
    event: Event
    fresh: bool


class Flight(NamedTuple):
    """A step that was scheduled and has not landed."""

    output: Any
    note: StepNote
    shares: list[Share]
