# SPDX-License-Identifier: Apache-2.0
"""The part of a trace that tells the story of a violation: what led to it, and what became of the request that the bytes came from, or that
was left over at the end."""

from __future__ import annotations

from typing import Any

from kvconform.backstory import source, tell

Event = dict[str, Any]
EXCERPT = 18
"""Events up to the violation; those about the origin of its bytes, at most half as many, come on top. If requests were left over at the
end: events of their lives; half as many before the end come on top."""
TOLD = {
    "step.scheduled", "req.scheduled", "lookup", "alloc", "req.state", "req.finished", "load.due", "kv.wrong", "kv.changed", "hold",
    "release", "transfer.reported", "transfer.failed", "cache.reset", "engine.crash", "engine.stall", "engine.lifecycle", "plan",
    "run.end", "profile.expectation", "case.expectation",
}  # fmt: skip
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
    left = _left_over(trace, event) if event["k"] == "run.end" else []
    mine = {req} if req is not None else set(left)
    chosen = [
        e for e in trace
        if e["seq"] == seq
        or e["k"] in TOLD and (not mine or _about(e, mine))
        or e["k"] == "hook.returned" and e["error"] is not None
    ]  # fmt: skip
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
    return list(dict.fromkeys([*end["engine_requests"], *end["request_objects_alive"], *(_holders(trace, end) if short else ())]))


def _holders(trace: list[Event], end: Event) -> list[str]:
    """Who had the blocks that somebody still counts on, since they were last free."""
    held: dict[int, list[str]] = {}
    for e in trace:
        if e.get("on") != end.get("on"):
            continue
        if e["k"] == "engine.lifecycle" and e["op"] == "restart":  # another pool
            held.clear()
        elif e["k"] == "block" and e["op"] == "alloc" and e["owner"] not in (None, "nobody"):
            held[e["id"]] = [e["owner"]]
        elif e["k"] == "block" and e["op"] == "free" and e["ref"] == 0:
            held.pop(e["id"], None)
        elif e["k"] == "req.finished":  # with a local hit, it has blocks that were handed out to others
            for block in {block for _, _, table in e["tables"] for block in table if block != 0}:
                held.setdefault(block, []).append(e["req"])
    return [req for reqs in held.values() for req in reqs]


def _lives(trace: list[Event], reqs: list[str], seq: int) -> list[Event]:
    """What became of these requests before `seq`: how each began and how it ended, if there is too much of it."""
    reqs = reqs[: EXCERPT // LEAST]
    found: list[Event] = []
    for req in reqs:
        mine = [e for e in trace if e["k"] in LIFE and e["seq"] < seq and e["req"] == req]
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
        e for e in trace
        if e.get("req") in (req, story[0] if story else req)
        and (
            e["k"] == "req.state" and "PREEMPTED" in (e["from"], e["to"])
            or e["k"] == "req.scheduled" and e["kind"] in ("new", "resumed")
            or e["k"] == "plan" and e["op"] == "save" and e["start"] <= max(pos, event["pos"]) and min(pos, event["pos"]) < e["end"]
        )
    ]  # fmt: skip
