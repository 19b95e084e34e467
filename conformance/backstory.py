# SPDX-License-Identifier: Apache-2.0
"""Where bytes that turned up in the wrong place had been: found in the trace afterwards, from the block tables of the requests.

A connector reads a block when it likes, and no event says so. What can be said is which block held the KV, since when and whose, and
whether the block is where an outdated table would have it: the mark of a save after a preemption that went by the table of before.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
_PLACE = re.compile(r"position (\d+) of request (\S+)")


@dataclass
class Stay:
    """One stay of a request on the engine, from an admission to a preemption: the steps, and its block table at the end."""

    since: int
    generation: int
    table: list[int]
    preempted: int | None = None


def source(event: Event) -> tuple[str, int] | None:
    """(request, position) that the bytes of a kv.wrong were first computed for, as its `origin` says; None if it names none."""
    found = _PLACE.search(str(event.get("origin") or "")) if event["k"] == "kv.wrong" else None
    return (found[2], int(found[1])) if found else None


def stays(trace: Iterable[Event], until: int) -> dict[str, list[Stay]]:
    """The stays of every request up to event `until` (its seq)."""
    found: dict[str, list[Stay]] = {}
    for e in trace:
        if e["seq"] > until:
            break
        if e["k"] == "req.scheduled":
            mine = found.setdefault(e["req"], [])
            if mine and mine[-1].generation != e["generation"]:
                mine.clear()  # another request of the same id
            if not mine or mine[-1].preempted is not None:
                mine.append(Stay(e["step"], e["generation"], []))
            mine[-1].table = e["table"]
        elif e["k"] == "req.state" and e["to"] == "PREEMPTED" and found.get(e["req"]):
            found[e["req"]][-1].preempted = e["step"]
    return found


def tell(trace: list[Event], event: Event) -> tuple[str, str] | None:
    """(request, sentence) about where the bytes of `event` (a kv.wrong of another position, with one table per request) had been and in
    whose table, if known."""
    place, start = source(event), trace[0]
    if place is None or event["found"] != "other_position" or start.get("groups", 1) > 1 or start.get("context_ranks", 1) > 1:
        return None
    size, (req, pos) = start["block_size"], place
    known = stays(trace, event["seq"])
    names = dict.fromkeys([req, *known])  # any request with the same prefix may have been saved; the first one is the likeliest
    if pos % size == event["pos"] % size:
        for name in names:
            mine = [stay for stay in known.get(name, []) if stay.since < event["step"]]  # what is read in a step was saved before it
            for text in _outdated(name, mine, pos // size, event["pos"] // size):
                return name, text
        for text in _misplaced(known.get(event["req"], []), pos // size, event["pos"] // size):
            return event["req"], text
    index = pos // size
    return next(((req, _held(req, pos, stay, stay.table[index])) for stay in known.get(req, []) if index < len(stay.table)), None)


def _held(req: str, pos: int, stay: Stay, block: int) -> str:
    until = f" to step {stay.preempted}" if stay.preempted is not None else " on"
    return f"block {block} of request {req} held position {pos} from step {stay.since}{until}"


def _misplaced(mine: list[Stay], loaded: int, wanted: int) -> Iterator[str]:
    """Whether the block of index `wanted` in the table of a stay is the one of index `loaded` in the table of the stay before."""
    for before, stay in itertools.pairwise(mine):
        if loaded != wanted and loaded < len(before.table) and wanted < len(stay.table) and before.table[loaded] == stay.table[wanted]:
            now = f"block {stay.table[wanted]} is block {wanted} of the request's table from step {stay.since} on"
            old = f"it was block {loaded} of it before the preemption in step {before.preempted}"
            yield f"{now}; {old}: a load that goes by the old table writes there"


def _outdated(req: str, mine: list[Stay], held: int, wanted: int) -> Iterator[str]:
    """Whether the block of index `held` in the table of a stay is the one of index `wanted` in the tables until then, joined."""
    for number, stay in enumerate(mine):
        before = [block for earlier in mine[:number] for block in earlier.table]
        joined = before + stay.table
        if not before or held >= len(stay.table) or wanted >= len(joined) or joined[wanted] != stay.table[held] or held == wanted:
            continue
        last = mine[number - 1].preempted
        text = f"block {joined[wanted]} held it from step {stay.since} on, as block {held} of the table of request {req}"
        if wanted < len(before):
            old = f"it was block {wanted} of that table before the preemption in step {last}"
            yield f"{text}; {old}: a save that goes by the old table reads it"
        else:
            old = f"appended to the table from before the preemption in step {last}, it is block {wanted}"
            yield f"{text}; {old}: a save reads it there if the connector appends a resumed request's blocks"
