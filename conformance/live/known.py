# SPDX-License-Identifier: Apache-2.0
"""What is known of the requests of a running engine: their incarnations, identities and content."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvconform.provenance import Chain, Identity


@dataclass
class Known:
    """One incarnation of a request id. `valid_end`: its KV is final up to there, as far as steps have landed; `named`: blocks that the
    workers were told of; `remembered`: positions that the run's memory has; `tainted`: a load of it failed since it was admitted."""

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
        {"at": feature.mm_position.offset, "length": feature.mm_position.length, "id": feature.identifier}
        for feature in getattr(request, "mm_features", None) or ()
    ]
    return Identity.of(getattr(request, "cache_salt", None), None if lora is None else lora.lora_name, items)


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
