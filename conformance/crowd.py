# SPDX-License-Identifier: Apache-2.0
"""What else went on around a request whose KV was to be kept: a connector that does its best may do less for it then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST = 64
LONGEST = 256


@dataclass(frozen=True)
class Crowd:
    """Tokens of the requests that ran before the source, in steps of its own (`beside`) and after it; tokens of the loads that were under
    way when its content was looked up again (`loads`), and of that content what the engine's own cache had (`local`). `steps` are those
    that went by from the source's first one to the lookup: what a connector stored may have expired."""

    before: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    local: int = 0
    steps: int = 0

    @property
    def tokens(self) -> int:
        """All of them together, with one for each step that must go by."""
        return sum(map(sum, (self.before, self.beside, self.after, self.loads))) + self.local + self.steps


NOBODY = Crowd()


def crowd_of(events: Sequence[dict[str, Any]], source: tuple[str, int], lookup: dict[str, Any]) -> Crowd:
    """The crowd of `source` (request id, generation) at a `lookup` event; at most MOST requests of each kind. Reads only."""
    asker = (lookup["req"], lookup["generation"])
    rows = [(_of(e), e) for e in events if e["k"] == "req.scheduled" and _of(e) != asker]
    mine = [e for key, e in rows if key == source]
    steps = {(e.get("on"), e["step"]) for e in mine}
    lengths: dict[tuple[str, int], int] = {}
    first: dict[tuple[str, int], int] = {}
    beside: set[tuple[str, int]] = set()
    for key, e in rows:
        lengths[key] = max(lengths.get(key, 0), min(e["C"] + e["S"], e["N"], LONGEST))
        first.setdefault(key, e["seq"])
        if (e.get("on"), e["step"]) in steps:
            beside.add(key)
    start = mine[0]["seq"] if mine else 0
    alone = [key for key in lengths if key != source and key not in beside]
    return Crowd(
        before=tuple(lengths[key] for key in alone if first[key] < start)[-MOST:],
        beside=tuple(lengths[key] for key in lengths if key != source and key in beside)[-MOST:],
        after=tuple(lengths[key] for key in alone if first[key] > start)[-MOST:],
        loads=tuple(_loads(events, lookup))[-MOST:],
        local=lookup["local"],
        steps=min(max(0, lookup["step"] - mine[0]["step"]), LONGEST) if mine else 0,
    )


def _of(event: dict[str, Any]) -> tuple[str, int]:
    return event["req"], event["generation"]


def _loads(events: Sequence[dict[str, Any]], lookup: dict[str, Any]) -> list[int]:
    """Tokens of each load that was granted in the step of the lookup, or earlier and is not over."""
    pending: dict[tuple[str, int], int] = {}
    now = (lookup.get("on"), lookup["step"])
    for e in events:
        if e["k"] == "alloc" and e["external"] > 0 and (e["is_async"] or (e.get("on"), e["step"]) == now):
            pending[_of(e)] = min(e["external"], LONGEST)
        elif e["k"] == "transfer.reported" and e["direction"] == "recv":
            pending.pop(_of(e), None)
    return list(pending.values())
