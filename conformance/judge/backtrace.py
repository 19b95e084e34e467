# SPDX-License-Identifier: Apache-2.0
"""Where bytes that turned up in the wrong place had been: found in the trace afterwards, from the block tables of the requests.

A connector reads a block when it likes, and no event says so. What can be said is which block held the KV, since when and whose, and
whether the block is where an outdated table would have it: the mark of a save after a preemption that went by the table of before.


The part of a trace that tells the story of a violation: what led to it, and what became of the request that the bytes came from, or that
was left over at the end.
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
    found = _PLACE.search(str(event.get("origin") or "")) if event["kind"] == "kv.wrong" else None
    return (found[2], int(found[1])) if found else None


def stays(trace: Iterable[Event], until: int) -> dict[str, list[Stay]]:
    """The stays of every request up to event `until` (its seq)."""
    found: dict[str, list[Stay]] = {}
    for e in trace:
        if e["seq"] > until:
            break
        if e["kind"] == "req.scheduled":
            mine = found.setdefault(e["req"], [])
            if mine and mine[-1].generation != e["generation"]:
                mine.clear()  # another request of the same id
            if not mine or mine[-1].preempted is not None:
                mine.append(Stay(e["step"], e["generation"], []))
            mine[-1].table = e["table"]
        elif e["kind"] == "req.state" and e["to"] == "PREEMPTED" and found.get(e["req"]):
            found[e["req"]][-1].preempted = e["step"]
    return found


def tell(trace: list[Event], event: Event) -> tuple[str, str] | None:
    """(request, sentence) about where the bytes of `event` (a kv.wrong of another position, with one table per request) had been and in
    whose table, if known."""
    place, start = source(event), trace[0]
    if (
        place is None
        or event["found"] != "other_position"
        or start.get("groups", 1) > 1
        or start.get("context_ranks", 1) > 1
    ):
        return None
    size, (req, pos) = start["block_size"], place
    known = stays(trace, event["seq"])
    names = dict.fromkeys(
        [req, *known]
    )  # any request with the same prefix may have been saved; the first one is the likeliest
    if pos % size == event["pos"] % size:
        for name in names:
            mine = [
                stay for stay in known.get(name, []) if stay.since < event["step"]
            ]  # what is read in a step was saved before it
            for text in _outdated(name, mine, pos // size, event["pos"] // size):
                return name, text
        for text in _misplaced(known.get(event["req"], []), pos // size, event["pos"] // size):
            return event["req"], text
    index = pos // size
    return next(
        (
            (req, _held(req, pos, stay, stay.table[index]))
            for stay in known.get(req, [])
            if index < len(stay.table)
        ),
        None,
    )


def _held(req: str, pos: int, stay: Stay, block: int) -> str:
    until = f" to step {stay.preempted}" if stay.preempted is not None else " on"
    return f"block {block} of request {req} held position {pos} from step {stay.since}{until}"


def _misplaced(mine: list[Stay], loaded: int, wanted: int) -> Iterator[str]:
    """Whether the block of index `wanted` in the table of a stay is the one of index `loaded` in the table of the stay before."""
    for before, stay in itertools.pairwise(mine):
        if (
            loaded != wanted
            and loaded < len(before.table)
            and wanted < len(stay.table)
            and before.table[loaded] == stay.table[wanted]
        ):
            now = f"block {stay.table[wanted]} is block {wanted} of the request's table from step {stay.since} on"
            old = f"it was block {loaded} of it before the preemption in step {before.preempted}"
            yield f"{now}; {old}: a load that goes by the old table writes there"


def _outdated(req: str, mine: list[Stay], held: int, wanted: int) -> Iterator[str]:
    """Whether the block of index `held` in the table of a stay is the one of index `wanted` in the tables until then, joined."""
    for number, stay in enumerate(mine):
        before = [block for earlier in mine[:number] for block in earlier.table]
        joined = before + stay.table
        if (
            not before
            or held >= len(stay.table)
            or wanted >= len(joined)
            or joined[wanted] != stay.table[held]
            or held == wanted
        ):
            continue
        last = mine[number - 1].preempted
        text = f"block {joined[wanted]} held it from step {stay.since} on, as block {held} of the table of request {req}"
        if wanted < len(before):
            old = f"it was block {wanted} of that table before the preemption in step {last}"
            yield f"{text}; {old}: a save that goes by the old table reads it"
        else:
            old = f"appended to the table from before the preemption in step {last}, it is block {wanted}"
            yield f"{text}; {old}: a save reads it there if the connector appends a resumed request's blocks"


EXCERPT = 18
"""Events up to the violation; those about the origin of its bytes, at most half as many, come on top. If requests were left over at the
end: events of their lives; half as many before the end come on top."""
TOLD = {
    "step.scheduled",
    "req.scheduled",
    "lookup",
    "alloc",
    "req.state",
    "req.finished",
    "load.due",
    "kv.wrong",
    "kv.changed",
    "hold",
    "release",
    "transfer.reported",
    "transfer.failed",
    "cache.reset",
    "engine.crash",
    "engine.stall",
    "engine.lifecycle",
    "plan",
    "run.end",
    "profile.expectation",
    "case.expectation",
}
LIFE = {"request.new", "lookup", "alloc", "req.state", "req.finished", "hold", "release"}
"""What happens to a request as a whole, however many steps it takes."""
LEAST = 3
"""Events of each request that was left over; of more than fit, the first ones are shown."""


def excerpt(trace: list[Event], seq: int, req: str | None) -> list[Event]:
    """The events that tell the story of the violation at `seq`: what concerns its request, the steps, and what crossed its worker.

    If it is about wrong bytes of another place, also what happened there: when its request was admitted, preempted, resumed and saved.
    If it is about what is left over at the end, the lives of the requests that it belongs to.
    """
    event = next(e for e in trace if e["seq"] == seq)
    left = _left_over(trace, event) if event["kind"] == "run.end" else []
    mine = {req} if req is not None else set(left)
    chosen = [
        e
        for e in trace
        if e["seq"] == seq
        or e["kind"] in TOLD
        and (not mine or _about(e, mine))
        or e["kind"] == "hook.returned"
        and e["error"] is not None
    ]
    before = [e for e in chosen if e["seq"] <= seq][-(EXCERPT // 2 if left else EXCERPT) :]
    there = {e["seq"] for e in before}
    origin = [e for e in _of_origin(trace, event) if e["seq"] < seq and e["seq"] not in there]
    lives = [e for e in _lives(trace, left, seq) if e["seq"] not in there]
    story = sorted(lives + origin[-EXCERPT // 2 :] + before, key=lambda e: e["seq"])
    return story + [e for e in chosen if e["seq"] > seq][:3]


def _about(event: Event, mine: set[str]) -> bool:
    """Whether it concerns one of these requests, or none at all."""
    who = event.get("req")
    return who is None or not mine.isdisjoint(who if isinstance(who, list) else [who])


def _left_over(trace: list[Event], end: Event) -> list[str]:
    """The requests that are still there or kept alive when the run ends, and those that had the blocks which are not free."""
    short = end["free_blocks"] != end["free_blocks_at_start"]
    return list(
        dict.fromkeys(
            [
                *end["engine_requests"],
                *end["request_objects_alive"],
                *(_holders(trace, end) if short else ()),
            ]
        )
    )


def _holders(trace: list[Event], end: Event) -> list[str]:
    """Who had the blocks that somebody still counts on, since they were last free."""
    held: dict[int, list[str]] = {}
    for e in trace:
        if e.get("on") != end.get("on"):
            continue
        if e["kind"] == "engine.lifecycle" and e["op"] == "restart":  # another pool
            held.clear()
        elif e["kind"] == "block" and e["op"] == "alloc" and e["owner"] not in (None, "nobody"):
            held[e["id"]] = [e["owner"]]
        elif e["kind"] == "block" and e["op"] == "free" and e["ref"] == 0:
            held.pop(e["id"], None)
        elif (
            e["kind"] == "req.finished"
        ):  # with a local hit, it has blocks that were handed out to others
            for block in {block for _, _, table in e["tables"] for block in table if block != 0}:
                held.setdefault(block, []).append(e["req"])
    return [req for reqs in held.values() for req in reqs]


def _lives(trace: list[Event], reqs: list[str], seq: int) -> list[Event]:
    """What became of these requests before `seq`: how each began and how it ended, if there is too much of it."""
    reqs = reqs[: EXCERPT // LEAST]
    found: list[Event] = []
    for req in reqs:
        mine = [e for e in trace if e["kind"] in LIFE and e["seq"] < seq and e["req"] == req]
        size = EXCERPT // len(reqs)
        found += mine if len(mine) <= size else mine[: size // 2] + mine[size // 2 - size :]
    return found


def _of_origin(trace: list[Event], event: Event) -> list[Event]:
    """Admissions, preemptions, resumptions and saves of the request whose bytes `event` found, and of the one whose save took them."""
    place = source(event)
    if place is None:
        return []
    (req, pos), story = place, tell(trace, event)
    return [
        e
        for e in trace
        if e.get("req") in (req, story[0] if story else req)
        and (
            e["kind"] == "req.state"
            and "PREEMPTED" in (e["from"], e["to"])
            or e["kind"] == "req.scheduled"
            and e["listed_as"] in ("new", "resumed")
            or e["kind"] == "plan"
            and e["op"] == "save"
            and e["start"] <= max(pos, event["pos"])
            and min(pos, event["pos"]) < e["end"]
        )
    ]
