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
    stalls = (e for e in trace if e["kind"] == "engine.stall" and e["seq"] > since)
    stall = next(stalls, None)
    if stall is None:
        return None
    if stall["advanced"]:
        return (
            "if a lease is to release the blocks: the clock was set forward by"
            f" {stall['advanced']:g} s; a longer lease, one that never expires, and one on another"
            f" clock do not end by that ({ADVICE})"
        )
    return (
        f"if a lease is to release the blocks: it had {stall['limit']:g} s of real time, as the"
        " clock is not set forward while a step with tokens is in flight;"
        f" shorten it for the suite, or raise stall_seconds ({ADVICE})"
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
