# SPDX-License-Identifier: Apache-2.0
"""What a run did so that a lease on held blocks could expire."""

from __future__ import annotations

from collections.abc import Sequence

from kvconform.contract.trace import Event

ADVICE = "docs/guide-connector-authors.md, Leases and time"


def lease_of(trace: Sequence[Event], event: Event) -> str | None:
    """Return how long a lease on the blocks of an unreported send had; None if none is held.

    `event` is the `hold` of the send, or the `run.end` of a run that did not come to rest.
    """
    since = _held_since(trace, event)
    if since is None:
        return None
    later = [e for e in trace if e["seq"] > since]
    seconds = sum(
        e["seconds"] for e in later if e["kind"] == "clock.advanced" and e["why"] == "stall"
    )
    if seconds:
        return (
            f"if a lease is to release the blocks: the clock was set forward by {seconds:g} s,"
            f" which ends no longer lease, none of 0 for ever, and none on another clock ({ADVICE})"
        )
    stall = next((e for e in later if e["kind"] == "engine.stall"), None)
    if stall is None:
        return None
    return (
        "if a lease is to release the blocks: requests were waiting, so the clock was not set"
        f" forward, and the lease had {stall['limit']:g} s of real time; shorten it for the suite,"
        f" or raise stall_seconds ({ADVICE})"
    )


def _held_since(trace: Sequence[Event], event: Event) -> int | None:
    """Return the seq from which on blocks were held for a send, or None."""
    if event["kind"] == "hold":
        return int(event["seq"]) if event["direction"] == "send" else None
    if event["kind"] != "run.end" or event["quiesced"]:
        return None
    held: dict[tuple[str | None, str, int], int] = {}
    for e in trace:
        if e["kind"] in ("hold", "release") and e["direction"] == "send":
            key = e.get("on"), e["req"], e["generation"]
            if e["kind"] == "hold":
                held[key] = e["seq"]
            else:
                held.pop(key, None)
    return min(held.values(), default=None)
