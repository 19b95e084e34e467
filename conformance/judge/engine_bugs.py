# SPDX-License-Identifier: Apache-2.0
"""When an engine has lost track of a request: what comes after is no fault of the connector's.

vLLM does so with a request whose load failed, in three ways. Under asynchronous scheduling it takes back the computed tokens of a
synchronous load that failed, but not the tokens in flight (bug B004): it computes from the wrong position ever after. It leaves the blocks
of a failed load in its own prefix cache, to be computed again: if their request is preempted first, the cache serves them as they are. And
it goes on keeping blocks free for an asynchronous load that failed: if the pool does not hold the request twice, its retry is never
admitted, nor is who waits behind it.

Until 0.15 it does so with a request that finished, too. If its blocks are kept for the connector, output of a step in flight is still added
to it; it may finish a second time, and the second report of its transfer ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvconform.contract.trace import Event, Trace

MISCOUNTED = "the engine lost count of request {req} when its load failed (bug B004)"
OVERRUN = "the engine added output to request {req}, which had finished (engine.finish-once)"
SERVED = (
    "the engine served blocks whose load had failed to request {req} (engine.failed-not-served)"
)
STARVED = "the engine kept blocks from request {req} for the load of its own that had failed (engine.retry-admitted)"


def note_unfilled(trace: Trace) -> None:
    """Fill in `unfilled` of the alloc events: shared blocks whose synchronous load failed and that have not been computed to their
    end since, not even in the step under way. Changes these events."""
    failed: dict[
        tuple[Any, int], set[int]
    ] = {}  # places in the block that are to be computed again
    open_allocs: list[Event] = []
    size = 1
    for e in trace.events:
        kind, on = e["kind"], e.get("on")
        if kind == "run.start":
            size = e["block_size"]
        elif kind == "transfer.failed" and not e["is_async"]:
            failed.update({(on, block): set(range(size)) for block in e["blocks"]})
        elif kind == "alloc":
            trace.amend(e, unfilled=[])
            open_allocs += [e] if failed else []
        elif kind == "block" and e["op"] == "alloc":
            failed.pop((on, e["id"]), None)
        elif kind == "req.scheduled" and failed:
            for position in range(
                e["output_computed"],
                min(e["output_computed"] + e["scheduled"], len(e["table"]) * size),
            ):
                key = on, e["table"][position // size]
                if key in failed:
                    failed[key].discard(position % size)
                    if not failed[key]:
                        del failed[key]
        elif kind == "worker.step_begin" and open_allocs:
            for alloc in open_allocs:
                shared = alloc["shared_blocks"]
                unfilled = [block for block in shared if (alloc.get("on"), block) in failed]
                trace.amend(alloc, unfilled=unfilled)
            open_allocs = []


def lost(trace: Iterable[Mapping[str, Any]]) -> tuple[int, str] | None:
    """(seq, in words) of the first time that the engine lost track of a request; None if it never did."""
    failed = False
    finished: dict[tuple[Any, ...], int] = {}  # request -> step
    waiting: dict[tuple[Any, str], tuple[int, str]] = {}
    for e in trace:
        if e["kind"] == "lookup" and e.get("starved"):
            waiting[e.get("on"), e["req"]] = e["seq"], STARVED.format(req=e["req"])
        elif e["kind"] in ("alloc", "req.finished"):
            waiting.pop((e.get("on"), e["req"]), None)  # it was only late
        elif e["kind"] == "run.end" and waiting and not e["quiesced"]:
            return min(waiting.values())
        if e["kind"] in ("req.finished", "sample"):
            who = e.get("on"), e["req"], e["generation"]
            if e["step"] > finished.get(who, e["step"]):
                return e["seq"], OVERRUN.format(req=e["req"])
            if e["kind"] == "req.finished":
                finished[who] = e["step"]
        elif e["kind"] == "transfer.failed":
            failed = failed or not e["is_async"]
        elif (
            failed
            and e["kind"] == "req.state"
            and e["reason"] == "rollback"
            and 0 < e["placeholders"] != e["computed"] - e["known"] + 1
        ):
            return e["seq"], MISCOUNTED.format(req=e["req"])
        elif failed and e["kind"] == "alloc" and e.get("unfilled"):
            return e["seq"], SERVED.format(req=e["req"])
    return None
