# SPDX-License-Identifier: Apache-2.0
"""The part of a trace that tells the story of a violation: what led to it, and what became of the request that the bytes came from."""

from __future__ import annotations

from typing import Any

from kvconform.backstory import source, tell

Event = dict[str, Any]
EXCERPT = 18
"""Events up to the violation; those about the origin of its bytes, at most half as many, come on top."""
TOLD = {
    "step.scheduled", "req.scheduled", "lookup", "alloc", "req.state", "req.finished", "load.due", "kv.wrong", "kv.changed", "hold",
    "release", "transfer.reported", "transfer.failed", "cache.reset", "engine.crash", "engine.stall", "engine.lifecycle", "plan",
    "run.end", "profile.expectation", "case.expectation",
}  # fmt: skip


def excerpt(trace: list[Event], seq: int, req: str | None) -> list[Event]:
    """The events that tell the story of the violation at `seq`: what concerns its request, the steps, and what crossed its worker.

    If it is about wrong bytes of another place, also what happened there: when its request was admitted, preempted, resumed and saved.
    """
    chosen = [
        e for e in trace
        if e["seq"] == seq
        or e["k"] in TOLD and (req is None or e.get("req") in (None, req) or isinstance(e.get("req"), list) and req in e["req"])
        or e["k"] == "hook.returned" and e["error"] is not None
    ]  # fmt: skip
    before = [e for e in chosen if e["seq"] <= seq][-EXCERPT:]
    there = {e["seq"] for e in before}
    origin = [e for e in _of_origin(trace, next(e for e in trace if e["seq"] == seq)) if e["seq"] < seq and e["seq"] not in there]
    story = sorted(origin[-EXCERPT // 2 :] + before, key=lambda e: e["seq"])
    return story + [e for e in chosen if e["seq"] > seq][:3]


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
