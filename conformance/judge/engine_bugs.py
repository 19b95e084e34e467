# SPDX-License-Identifier: Apache-2.0
"""Bugs by which vLLM loses track of a request; what follows is not the connector's fault.

It happens around a load that failed, in four ways:

- Under asynchronous scheduling, vLLM takes back the computed tokens of a synchronous load that
  failed, but not the tokens in flight (bug B004). From then on it computes from the wrong position.
  So it does with other requests that share the blocks and have a later step in flight.
- It leaves the blocks of a failed load in its own prefix cache, to be computed again, and those
  that were computed upon it. If their request is preempted first, the cache serves them as they
  are.
- It takes back the computed tokens of the request whose load failed, but not those of another one
  that shares the blocks. If they are computed again in more than one step (by a token budget or
  long_prefill_token_threshold), the other request reads blocks that are filled in part.
- It goes on keeping blocks free for an asynchronous load that failed. If the pool cannot hold the
  request twice, its retry is never admitted, and neither are the requests that wait behind it. It
  also lets the retry wait in front of requests that hold what it waits for, and could go on.

A request that loses its place in a step, in which it was scheduled before, leaves blocks in the
prefix cache that this step would have computed.

A session whose turn ends by a token that arrives when it was preempted is forgotten, too. One whose
turn ends within a run of accepted drafts counts those behind its end as computed.

What the engine does not pass from one half of a connector to the other is no fault of the
connector's, either: a report of the worker half, or the metadata of a step.

Until 0.15 it also happens to a finished request whose blocks are kept for the connector: output of
a step in flight is still added to it. It may finish a second time, and the second report of its
transfer ends the engine.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvconform.contract.events import NO_OWNER, SIZED
from kvconform.contract.trace import Event, Trace, own_settings

MISCOUNTED = "the engine lost count of request {req} when its load failed (bug B004)"
OVERRUN = "the engine added output to request {req}, which had finished (engine.finish-once)"
SERVED = (
    "the engine served blocks whose load had failed to request {req} (engine.failed-not-served)"
)
READ = (
    "the engine let request {req} read shared blocks whose load had failed and that were not"
    " computed again"
)
UNCOMPUTED = (
    "the engine served request {req} blocks of a step in which another request took the place of"
    " theirs (engine.publishes-computed)"
)
RELAYED = "the engine did not pass on {what} ({guarantee})"
STARVED = (
    "the engine kept blocks from request {req} for the load of its own that had failed, or let"
    " it wait in front of a request that held them (engine.retry-admitted)"
)
FORGOTTEN = (
    "the engine forgot session {req}, whose turn ended when it was preempted"
    " (engine.session-goes-on)"
)
OVERCOUNTED = (
    "the engine counts tokens of session {req} as computed that it has dropped"
    " (engine.session-counts-own)"
)
RECENT = 64
"""Rows that may have been scheduled before a load of their step failed."""
MOST_IN_FLIGHT = 8
"""More steps than an engine has in flight."""
Key: TypeAlias = tuple[str | None, int]
"""An engine, and a block of its pool."""
Slots: TypeAlias = dict[Key, set[int]]
"""The slots of a block that are still to be computed again."""
Who: TypeAlias = tuple[str | None, str]
"""An engine, and the id of a request."""


def note_unfilled(trace: Trace) -> None:
    """Fill in `unfilled` of alloc and req.scheduled events: blocks whose synchronous load failed.

    Of an alloc, these are shared blocks, those that were computed upon a failed load included, if
    the engine had heard of the failure by then. Of a request that is scheduled, they are blocks
    before its first position of the step whose own load failed: that it goes on from what it
    computed itself upon such a load is a fault of its own, which no known bug excuses. Blocks that
    have been computed to their end since are left out; the step under way counts. Changes these
    events.
    """
    events = trace.events
    if not any([e["kind"] == "transfer.failed" and not e["is_async"] for e in events]):
        for alloc in [e for e in events if e["kind"] == "alloc"]:
            trace.amend(alloc, unfilled=[])
        return
    failed: Slots = {}
    upon: Slots = {}  # the same of blocks that were computed upon a failed load
    sources: dict[Key, str] = {}  # of both, the requests whose load failed
    heard: dict[str, int] = {}  # since when the engine knows of these failures
    open_allocs: list[Event] = []
    open_rows: list[Event] = []
    recent: deque[Event] = deque(maxlen=RECENT)
    own = own_settings(events)
    every = 1

    def size_on(on: str | None) -> int:
        return int(own[on]["block_size"]) if on in own else every

    for e in events:
        kind = e["kind"]
        on = e.get("on")
        size = size_on(on)
        if kind in SIZED:
            every = e["block_size"]
        elif kind == "transfer.failed" and not e["is_async"]:
            failed.update({(on, block): set(range(size)) for block in e["blocks"]})
            sources.update({(on, block): e["req"] for block in e["blocks"]})
            heard.pop(e["req"], None)
            for row in [r for r in recent if r.get("on") == on and r["step"] >= e["step"]]:
                _compute(failed, upon, sources, row, size)
        elif _hears(e):
            heard.setdefault(e["req"], e["seq"])
        elif kind == "alloc":
            trace.amend(e, unfilled=[])
            if failed or upon:
                open_allocs.append(e)
        elif kind == "block" and e["op"] == "alloc":
            failed.pop((on, e["id"]), None)
            upon.pop((on, e["id"]), None)
        elif kind == "req.scheduled":
            recent.append(e)
            if failed or upon:
                _compute(failed, upon, sources, e, size)
                open_rows.append(e)
        elif kind == "worker.step_begin" and (open_allocs or open_rows):
            # Late workers begin a step when later ones have been scheduled.
            for row in [each for each in open_rows if each["step"] <= e["step"]]:
                open_rows.remove(row)
                before = row["table"][: row["output_computed"] // size_on(row.get("on"))]
                unfilled = [block for block in before if (row.get("on"), block) in failed]
                trace.amend(row, unfilled=unfilled)
            for alloc in [each for each in open_allocs if each["step"] <= e["step"]]:
                open_allocs.remove(alloc)
                shared = alloc["shared_blocks"]
                keys = [(alloc.get("on"), block) for block in shared]
                bad = [key for key in keys if key in failed or key in upon]
                known = alloc["seq"]
                unfilled = [key[1] for key in bad if heard.get(sources[key], known) < known]
                trace.amend(alloc, unfilled=unfilled)


def _hears(e: Mapping[str, Any]) -> bool:
    """Return whether an event shows that the engine has heard of a request's failed load."""
    return bool(
        e["kind"] == "req.finished" or (e["kind"] == "req.state" and e["reason"] == "rollback")
    )


def _compute(failed: Slots, upon: Slots, sources: dict[Key, str], row: Event, size: int) -> None:
    """Take what a request computes out of both, or add it to `upon` if it rests on such slots."""
    on, table, start = row.get("on"), row["table"], row["output_computed"]
    end = min(start + row["scheduled"], len(table) * size)
    unsound = next(
        (
            (on, block)
            for index, block in enumerate(table[: -(-start // size)])
            for slots in (failed, upon)
            for slot in slots.get((on, block), ())
            if index * size + slot < start
        ),
        None,
    )
    for position in range(start, end):
        key, slot = (on, table[position // size]), position % size
        _fill(failed, key, slot)
        if unsound is not None:
            upon.setdefault(key, set()).add(slot)
            sources[key] = sources[unsound]
        else:
            _fill(upon, key, slot)


def _fill(slots: Slots, key: Key, slot: int) -> None:
    if key in slots:
        slots[key].discard(slot)
        if not slots[key]:
            del slots[key]


@dataclass(frozen=True, slots=True)
class Loss:
    """The engine lost track of a request.

    `seq` is when it shows, `why` says it in a sentence. `who` is the request; None if what the
    engine lost is not one of a request.
    """

    seq: int
    why: str
    who: Who | None


def lost(trace: Iterable[Mapping[str, Any]]) -> Loss | None:
    """Return the first loss that shows, or None."""
    return next(losses(trace), None)


def losses(trace: Iterable[Mapping[str, Any]]) -> Iterator[Loss]:
    """Yield when the engine loses track of requests, as it shows. A request may come repeatedly.

    Each bug has a mark of its own: a request that is miscounted has a block whose synchronous
    load failed, one that is starved has a load that failed, be it a sibling's.
    """
    failed: dict[Key, str] = {}  # the requests whose load failed
    unheard: dict[str, Mapping[str, Any]] = {}  # the failures of which the engine has not heard
    tables: dict[Who, list[int]] = {}  # blocks of requests that have run
    # their (step, first position)
    rows: defaultdict[Who, deque[tuple[int, int]]] = defaultdict(
        lambda: deque(maxlen=MOST_IN_FLIGHT)
    )
    most: dict[Who, int] = {}  # where they have to go on at the latest
    is_reference = False  # that engine loses no request
    finished: dict[tuple[str | None, str, int], int] = {}  # (engine, request, generation) -> step
    displaced: set[Key] = set()  # published blocks that no step computes to their end
    waiting: dict[Who, int] = {}  # starved requests, and when they were looked up
    known: Counter[Who] = Counter()  # the tokens of requests
    for e in trace:
        kind = e["kind"]
        if kind == "run.start":
            is_reference = e.get("engine") == "reference"
        elif unheard and _hears(e):
            failure = unheard.pop(e["req"], None)
            if failure is not None and not is_reference:
                most.update(_overtaken(failure, tables, rows))
        elif kind == "block" and e["op"] == "alloc":
            failed.pop((e.get("on"), e["id"]), None)
            if e.get("owner") != NO_OWNER:  # else it was that of a request that lost its place
                displaced.discard((e.get("on"), e["id"]))
        elif kind == "req.displaced":
            displaced.update((e.get("on"), block) for block in e["published"])
        elif displaced and kind == "alloc" and _shares(e, displaced):
            yield _loss(e, UNCOMPUTED)
        if kind == "req.finished" or (kind == "req.state" and e["to"] == "PREEMPTED"):
            for each in (tables, rows, most):
                each.pop((e.get("on"), e["req"]), None)
        if kind == "lookup" and e.get("starved"):
            waiting[e.get("on"), e["req"]] = e["seq"]
        elif kind in ("lookup", "alloc", "req.finished"):
            # It was only late, or waits for something else.
            waiting.pop((e.get("on"), e["req"]), None)
        elif kind == "run.end" and waiting and not e["quiesced"]:
            for starved, seq in sorted(waiting.items(), key=lambda item: item[1]):
                yield Loss(seq, STARVED.format(req=starved[1]), starved)
        if kind == "req.state" and not is_reference:
            text = _misplaced(e, known)
            if text is not None:
                yield _loss(e, text)
        if kind == "relay.broken":
            guarantee = f"engine.relays-{e['way']}"
            why = RELAYED.format(what=", ".join(e["what"]), guarantee=guarantee)
            yield Loss(e["seq"], why, None)
        if kind == "sample":
            known[e.get("on"), e["req"]] += 1
        if kind == "req.scheduled":
            key = e.get("on"), e["req"]
            known[key] = e.get("known", 0)
            tables[key] = e["table"]
            rows[key].append((e["step"], e["output_computed"]))
            if e["output_computed"] > most.pop(key, e["output_computed"]):
                yield _loss(e, MISCOUNTED)
        if kind in ("req.finished", "sample"):
            who = e.get("on"), e["req"], e["generation"]
            if e["step"] > finished.get(who, e["step"]):
                yield _loss(e, OVERRUN)
            if kind == "req.finished":
                finished[who] = e["step"]
        elif kind == "transfer.failed":
            if not e["is_async"]:
                failed.update({(e.get("on"), block): e["req"] for block in e["blocks"]})
                unheard[e["req"]] = e
        elif failed and kind == "req.state" and e["reason"] == "rollback":
            held = tables.get((e.get("on"), e["req"]), [])
            touched = any((e.get("on"), block) in failed for block in held)
            if touched and 0 < e["placeholders"] != e["computed"] - e["known"] + 1:
                yield _loss(e, MISCOUNTED)
        elif failed and kind == "alloc" and e.get("unfilled"):
            yield _loss(e, SERVED)
        elif failed and kind == "req.scheduled" and e.get("unfilled"):
            # A step that was scheduled before the failure arrived is dropped when it does.
            sources = (failed.get((e.get("on"), block)) for block in e["unfilled"])
            if any(req not in unheard for req in sources):
                yield _loss(e, READ)


def _shares(alloc: Mapping[str, Any], blocks: Set[Key]) -> bool:
    """Return whether an alloc takes one of these blocks from the prefix cache."""
    return any((alloc.get("on"), block) in blocks for block in alloc["shared_blocks"])


def _loss(e: Mapping[str, Any], why: str) -> Loss:
    return Loss(e["seq"], why.format(req=e["req"]), (e.get("on"), e["req"]))


def _misplaced(e: Mapping[str, Any], known: Mapping[Who, int]) -> str | None:
    """Return what is wrong with a session whose turn ends with a req.state: a sentence, or None.

    `known`: how many tokens it has, without input that came meanwhile.
    """
    if e["reason"] != "output" or not e["to"].startswith("WAITING"):
        return None
    if e.get("from") == "PREEMPTED":
        return FORGOTTEN
    own = known.get((e.get("on"), e["req"]))
    return OVERCOUNTED if own is not None and e["computed"] >= own else None


def _overtaken(
    failure: Mapping[str, Any],
    tables: Mapping[Who, list[int]],
    rows: Mapping[Who, Iterable[tuple[int, int]]],
) -> dict[Who, int]:
    """Return the requests that had a later step in flight when the engine heard of a failed load.

    Each has a block of that load. The number is the first position that it computed in one of these
    steps: all that it computed from there on is unsound.
    """
    found = {}
    for key, table in tables.items():
        if key[0] == failure.get("on") and not set(failure["blocks"]).isdisjoint(table):
            flying = [row for row in rows[key] if row[0] >= failure["step"]]
            if any(step > failure["step"] for step, _ in flying):
                found[key] = min(start for _, start in flying)
    return found
