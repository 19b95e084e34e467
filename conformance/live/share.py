# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's probe keeps of steps in flight: each request's share of them, and the loads under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvconform.live.shape import Shape
from kvconform.trace import Event


class Grants:
    """What the observer and the ledger ask of an oracle: the shape of the cache, the loads under way, what was reported as failed."""

    def __init__(self, shape: Shape) -> None:
        self.cache = shape
        self.grants: list[Any] = []
        self.failed_blocks: set[int] = set()
        self.failed_reqs: set[str] = set()

    def open_grants(self) -> list[Any]:
        """Loads that the engine has not relied on yet."""
        return [grant for grant in self.grants if grant.open]


@dataclass
class Share:
    """A request's share of a step in flight: where it starts for the scheduler, tokens, drafts among them, its event; `fresh`: admitted."""

    req: str
    start: int
    count: int
    drafts: int
    event: Event
    fresh: bool
