# SPDX-License-Identifier: Apache-2.0
"""The story of a violation, found in the trace afterwards.

`tell` says where bytes in a wrong place were before, from the block tables of the requests. No
event says when a connector reads a block. The tables do show which block held the KV, since when,
and for which request. They also show whether an outdated table would have put the block there: the
sign of a save after a preemption that used the table from before it.

`excerpt` selects the events that led to a violation, and those about the request that the wrong
bytes came from, or about the requests that were left over at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kvconform.contract.events import NO_OWNER, block_size_at, is_restart
from kvconform.contract.trace import Event
from kvconform.judge.describe import namesake, spans
from kvconform.judge.identity import namesake_of
from kvconform.judge.strays import LOADING, loader

Side = Literal["load", "save"]
"""Where the mistake was made that wrong bytes show."""


class Story(NamedTuple):
    """Where wrong bytes were before.

    `req` is the request whose table shows it; `side` is where they went wrong, as far as that is
    known. `outdated` is the step of the preemption, or of a session's next admission, before which
    a table was right that explains them; `suspected` the same, if that table only may explain them.
    `failed`: a load into the block had failed.
    """

    req: str
    text: str
    side: Side | None = None
    outdated: int | None = None
    suspected: int | None = None
    failed: bool = False


@dataclass
class Stay:
    """One stay of a request on the engine, from an admission to a preemption or its end.

    A session stays until it is admitted again with more input (`readmitted`), and keeps its blocks.
    `since`, `preempted`, `readmitted` and `finished` are steps; `table` is the block table at the
    end of the stay, and `got` the step in which each of its blocks was first there.
    """

    since: int
    generation: int
    table: list[int]
    preempted: int | None = None
    readmitted: int | None = None
    finished: int | None = None
    got: dict[int, int] = field(default_factory=dict)

    @property
    def left(self) -> str | None:
        """How and when the stay ended, in words; None if it did not."""
        if self.preempted is not None:
            return f"its preemption in step {self.preempted}"
        return None if self.finished is None else f"its end in step {self.finished}"

    @property
    def until(self) -> int | None:
        """The step in which the stay ended."""
        return self.preempted if self.preempted is not None else self.finished

    @property
    def changed(self) -> int | None:
        """The step in which the request got another table, to which it may not be appended."""
        return self.preempted if self.preempted is not None else self.readmitted

    @property
    def change(self) -> str:
        """What `changed` is, in words."""
        what = "preemption" if self.preempted is not None else "admission"
        return f"the {what} in step {self.changed}"


def source(event: Event) -> tuple[str, int] | None:
    """Return the request and the position that the bytes of a kv.wrong were first computed for.

    None for other events, and for bytes that were computed for no request.
    """
    req, pos = event.get("origin_req"), event.get("origin_pos")
    return (req, pos) if req is not None and pos is not None else None


def stays(trace: Iterable[Event], until: int) -> dict[str, list[Stay]]:
    """Return the stays of every request up to the event whose seq is `until`."""
    found: dict[str, list[Stay]] = {}
    for e in trace:
        if e["seq"] > until:
            break
        if e["kind"] == "req.scheduled":
            mine = found.setdefault(e["req"], [])
            if mine and mine[-1].generation != e["generation"]:
                mine.clear()  # another request of the same id
            again = e.get("listed_as") == "new" and bool(mine)
            if again and mine[-1].preempted is None:
                mine[-1].readmitted = e["step"]
            if not mine or again or mine[-1].preempted is not None:
                mine.append(Stay(e["step"], e["generation"], []))
            mine[-1].table = e["table"]
            for block in e["table"]:
                mine[-1].got.setdefault(block, e["step"])
        elif e["kind"] == "req.state" and e["to"] == "PREEMPTED" and found.get(e["req"]):
            found[e["req"]][-1].preempted = e["step"]
        elif e["kind"] == "req.finished" and found.get(e["req"]):
            found[e["req"]][-1].finished = e["step"]
    return found


def tell(trace: list[Event], event: Event) -> Story | None:
    """Return the story of the wrong bytes of `event`.

    None if that is not known, as in a run with several block tables per request (KV cache groups,
    context ranks), or whose blocks have had another size. The event may also be that a load wrote
    elsewhere, or did not write, or that a hook raised: the story says whether the table from before
    a preemption explains that.
    """
    start = trace[0]
    if start.get("groups", 1) > 1 or start.get("context_ranks", 1) > 1:
        return None
    kind = event["kind"]
    if kind == "hook.returned" and event["error"] is not None:
        return _readmitted(trace, event)
    if kind not in ("kv.changed", "load.due", "kv.wrong"):
        return None
    size = block_size_at(trace, event)
    if event.get("on") is None and size != start["block_size"]:
        return None
    if kind == "kv.changed":
        return next(_strayed(trace, event, size), None)
    if kind == "load.due":
        return next(_missed(trace, event, size), None)
    if event["found"] == "never_computed":
        return next(_too_early(trace, event, size), None)
    place = source(event)
    if place is None or event["found"] not in ("other_position", "other_request"):
        return None
    req, pos = place
    held = pos // size
    wanted = event["pos"] // size
    known = stays(trace, event["seq"])
    if event["found"] == "other_request":
        if pos % size != event["pos"] % size:
            return None
        return next(_taken(known, req, held, wanted), None)
    if pos % size == event["pos"] % size:
        # Any request with the same prefix may have been saved; that of the bytes is the likeliest.
        for name in dict.fromkeys([req, *known]):
            # What is read in a step was saved before it.
            mine = [stay for stay in known.get(name, []) if stay.since < event["step"]]
            for step, text in _outdated(name, mine, held, wanted):
                return Story(name, text + _or_doubled(mine, held, wanted), "save", step)
        for step, text in _misplaced(known.get(event["req"], []), held, wanted):
            return Story(event["req"], text, "load", step)
    for stay in known.get(req, []):
        if held < len(stay.table):
            return Story(req, _held(req, pos, stay, stay.table[held]))
    return None


def _readmitted(trace: list[Event], event: Event) -> Story | None:
    """Return which request of the step of a hook that raised has another table than it once had.

    The connector may have used the old one; nothing proves it.
    """
    step = event["step"]
    # What a hook was called with is recorded after it.
    now = [e for e in trace if e["step"] == step]
    admitted = {e["req"] for e in now if e["kind"] == "alloc"}
    planned = {e["req"] for e in now if e["kind"] in ("req.scheduled", "req.interrupted")}
    for req, mine in stays(trace, event["seq"]).items():
        if req not in admitted | planned:
            continue
        changes = [(stay.changed, stay.change) for stay in mine if stay.changed is not None]
        if not changes and req in admitted and mine[-1].since < step:
            changes = [(step, f"its admission in step {step}")]  # a session's
        if changes:
            changed, what = changes[-1]
            text = f"request {req} of this step has another block table since {what}"
            if _has_grown(mine):
                text = f"request {req} of this step has got more tokens and blocks since {what}"
            return Story(req, text, suspected=changed)
    return None


def _has_grown(mine: list[Stay]) -> bool:
    """Return whether the last stay's table goes on with that of the stay before."""
    *_, before, last = [Stay(0, 0, []), *mine]
    return bool(before.table) and last.table[: len(before.table)] == before.table


def _taken(
    known: dict[str, list[Stay]], owner: str, held: int, wanted: int, only: int | None = None
) -> Iterator[Story]:
    """Yield a story per request that had the block of `owner` before it, at the index `wanted`.

    A save of that request that read the block too late, or by its old table, found KV of `owner`;
    which of the two, nothing tells. `held` is the block's index in the table of `owner`, and `only`
    its id if that is known.
    """
    for stay in known.get(owner, []):
        if held >= len(stay.table):
            continue
        block = stay.table[held]
        if only is not None and block != only:
            continue
        for name, others in known.items():
            for earlier in others:
                if (
                    name != owner
                    and wanted < len(earlier.table)
                    and earlier.table[wanted] == block
                    and earlier.until is not None
                    and earlier.until <= stay.got[block]
                ):
                    text = (
                        f"block {block} was block {wanted} of request {name} up to {earlier.left},"
                        f" and belongs to request {owner} from step {stay.got[block]} on:"
                        f" a save of {name} read it after that"
                    )
                    yield Story(name, text, "save", suspected=earlier.preempted)


def _held(req: str, pos: int, stay: Stay, block: int) -> str:
    until = f" to step {stay.preempted}" if stay.preempted is not None else " on"
    return f"block {block} of request {req} held position {pos} from step {stay.got[block]}{until}"


def _misplaced(mine: list[Stay], loaded: int, wanted: int) -> Iterator[tuple[int | None, str]]:
    """Yield a sentence per stay in which a load by the table before it would write to `wanted`.

    Each comes with the step in which the table changed between the two.

    The block of index `wanted` of the stay's table has index `loaded` in that of the stay before.
    """
    for before, stay in itertools.pairwise(mine):
        if (
            loaded != wanted
            and loaded < len(before.table)
            and wanted < len(stay.table)
            and before.table[loaded] == stay.table[wanted]
        ):
            block = stay.table[wanted]
            text = (
                f"block {block} is block {wanted} of the request's table from step"
                f" {stay.got[block]} on;"
                f" it was block {loaded} of it before {before.change}:"
                " a load that uses the old table writes there"
            )
            yield before.changed, text


def _outdated(
    req: str, mine: list[Stay], held: int, wanted: int
) -> Iterator[tuple[int | None, str]]:
    """Yield a sentence per stay in which a save by an outdated table would read another block.

    Each comes with the step before which the table was right.

    The block of index `held` of the stay's table has index `wanted` in the joined tables of this
    stay and those before it.
    """
    for number, stay in enumerate(mine):
        before, last = _before(mine[:number])
        joined = before + stay.table
        if last is None or not before or held == wanted or held >= len(stay.table):
            continue
        text = (
            f"block {stay.table[held]} held it from step {stay.got[stay.table[held]]} on,"
            f" as block {held} of the table of request {req}"
        )
        if wanted >= len(joined) or joined[wanted] != stay.table[held]:
            kept = _kept(mine[:number], stay)
            if kept[wanted : wanted + 1] == [stay.table[held]]:
                old = (
                    f"in the table from before {last.change}, with the blocks that came later,"
                    f" it is block {wanted}"
                )
                yield last.changed, f"{text}; {old}: a save that keeps the old table reads it"
            continue
        if wanted < len(before):
            old = f"it was block {wanted} of that table before {last.change}"
            yield last.changed, f"{text}; {old}: a save that uses the old table reads it"
        else:
            appended = (
                f"{text}; appended to the table from before {last.change},"
                f" it is block {wanted}: a save reads it there if the connector appends"
                f" {'a resumed request' if last.preempted is not None else 'a session'}'s blocks"
            )
            yield last.changed, appended


def _or_doubled(mine: list[Stay], held: int, wanted: int) -> str:
    """Return that a list of the engine's in place of a table explains it, too, if it does.

    In such a list each block that comes after an admission is twice: model runner V1 appends it,
    and so does the connector.
    """
    for stay in mine:
        later = [block for block in stay.table if stay.got[block] > stay.since]
        steps = [list(blocks) for _, blocks in itertools.groupby(later, stay.got.__getitem__)]
        doubled = [block for block in stay.table if block not in later]
        doubled += [block for blocks in steps for block in 2 * blocks]
        if held < len(stay.table) and doubled[wanted : wanted + 1] == [stay.table[held]]:
            return (
                "; so does one that kept a list of the SchedulerOutput in place of a copy:"
                " the engine appends to it, too"
            )
    return ""


def _before(mine: list[Stay]) -> tuple[list[int], Stay | None]:
    """Return the joined tables of the stays that are over, and the last of these."""
    ended = [stay for stay in mine if stay.changed is not None]
    return [block for stay in ended for block in stay.table], ended[-1] if ended else None


def _kept(before: list[Stay], stay: Stay) -> list[int]:
    """Return the table of a connector that only adds blocks which come after an admission."""
    first, *more = [*(each for each in before if each.changed is not None), stay]
    added = [[block for block in each.table if each.got[block] > each.since] for each in more]
    return sum(added, first.table)


def _too_early(trace: list[Event], event: Event, size: int) -> Iterator[Story]:
    """Yield a story per request that may have saved `origin_block` before it was computed.

    A load into it had failed or left it out, and the owner saved it before it was computed; or
    another request had it before, and saved it too late; or the owner saved it by an outdated
    table, as it never was at this index of its table. Where it was there once, an outdated table is
    only suspected: a save by the right one may have come before the KV.
    """
    block = event.get("origin_block")
    if block is None:
        return
    wanted = event["pos"] // size
    owner = event["origin_req"]
    known = stays(trace, event["seq"])
    for e in trace[: event["seq"]]:
        if e["kind"] == "transfer.failed" and e["req"] == owner and block in e["blocks"]:
            text = f"the load into block {block} had failed in step {e['step']}"
            yield Story(owner, text, failed=True)
        left_out = e["kind"] == "load.due" and e["req"] == owner and not e["reported_failed"]
        if left_out and any(
            stay.table[position // size : position // size + 1] == [block]
            for position in e["missing"]
            for stay in known.get(owner, [])
        ):
            text = f"the load in step {e['step']} had left block {block} out, and reported nothing"
            yield Story(owner, text, failed=True)
    by_table = list(_by_kept_table(known, owner, block, wanted))
    # What a save of another request explains, too late, one by an old table may explain as well.
    suspects = [(story.req, story.outdated) for story in by_table] + [
        (name, stay.changed)
        for name in dict.fromkeys([owner, *known])
        for stay in known.get(name, [])
        if stay.changed is not None and stay.table[wanted : wanted + 1] == [block]
    ]
    for stay in known.get(owner, []):
        if block in stay.table:
            for story in _taken(known, owner, stay.table.index(block), wanted, block):
                if story.suspected is None and suspects:
                    req, changed = suspects[0]
                    story = story._replace(req=req, suspected=changed)
                yield story
    yield from by_table
    if any(stay.table[wanted : wanted + 1] == [block] for stay in known.get(owner, [])[-1:]):
        return  # the right table
    for req, changed in suspects:
        text = (
            f"block {block} was block {wanted} of request {req} before step {changed}:"
            " a save that uses the old table reads it"
        )
        yield Story(req, text, suspected=changed)


def _by_kept_table(
    known: dict[str, list[Stay]], owner: str, block: int, wanted: int
) -> Iterator[Story]:
    """Yield a story per request whose table from before is such that block `wanted` is `block`."""
    for name in dict.fromkeys([owner, *known]):
        mine = known.get(name, [])
        if any(stay.table[wanted : wanted + 1] == [block] for stay in mine):
            continue
        for number, stay in enumerate(mine):
            before, last = _before(mine[:number])
            if last is None or block not in stay.table:
                continue
            tables = (before + stay.table, _kept(mine[:number], stay))
            if any(table[wanted : wanted + 1] == [block] for table in tables):
                text = (
                    f"block {block} is block {stay.table.index(block)} of the table of request"
                    f" {name} from step {stay.got[block]} on; with the table from before"
                    f" {last.change} ahead of it, it is block {wanted}: a save reads it there if"
                    " the connector keeps that table"
                )
                yield Story(name, text, "save", last.changed)


def _strayed(trace: list[Event], event: Event, size: int) -> Iterator[Story]:
    """Yield a story if a load wrote into blocks that only an old table of its request has."""
    req = loader(trace, event)
    if req is None:
        return
    before, last = _before(stays(trace, event["seq"]).get(req, []))
    astray = (*event["unallocated"], *event["other_request"])
    blocks = dict.fromkeys(slot // size for slot in astray)
    if blocks and last is not None and set(blocks) <= set(before):
        text = (
            f"request {req} had {_blocks(blocks)} before {last.change}:"
            " a load that uses the old table writes there"
        )
        yield Story(req, text, "load", last.changed)


def _missed(trace: list[Event], event: Event, size: int) -> Iterator[Story]:
    """Yield a story if a load by an old table of the request would miss what is missing.

    That is possible, not proved: a load that writes nothing misses the same. Without such writes,
    the story only says that there is an old table.
    """
    grant = next(
        (
            e
            for e in reversed(trace[: event["seq"]])
            if e["kind"] == "alloc" and e["transfer"] == event["transfer"] is not None
        ),
        None,
    )
    if grant is None or not event["missing"] or event["reported_failed"]:
        return
    before, last = _before(stays(trace, grant["seq"]).get(event["req"], []))
    lacking = dict.fromkeys(position // size for position in event["missing"])
    mine = grant["blocks"]
    if last is not None and all(before[at : at + 1] != mine[at : at + 1] for at in lacking):
        joined = before + mine
        instead = dict.fromkeys(joined[at] for at in lacking if at < len(joined))
        astray = {
            slot // size
            for e in trace[grant["seq"] : event["seq"]]
            if e["kind"] == "kv.changed" and e["after_hook"] in LOADING
            for slot in (*e["unallocated"], *e["other_request"])
        }
        text = f"the request has another block table since {last.change}"
        if set(instead) <= astray | set(mine):  # writes to its own blocks are not told
            text = (
                f"a load that keeps the request's table from before {last.change}"
                f" writes {_blocks(instead)} instead"
            )
        yield Story(event["req"], text, suspected=last.changed)


def _blocks(blocks: Iterable[int]) -> str:
    """Return blocks in words."""
    listed = list(blocks)
    return f"{'block' if len(listed) == 1 else 'blocks'} {spans(listed)}"


EXCERPT = 12
"""The number of events up to the violation that an excerpt shows.

If requests were left over at the end, it is the number of events of their lives, and half as many
before the end come on top.
"""
ORIGIN = 8
"""The number of events about the origin of wrong bytes that come on top."""
AFTER = 2
"""The number of events of the same step after the violation."""

SHOWN = {
    "step.scheduled",
    "req.scheduled",
    "req.interrupted",
    "lookup",
    "lookup.namesake",
    "alloc",
    "req.state",
    "req.finished",
    "load.due",
    "kv.wrong",
    "kv.changed",
    "hold",
    "release",
    "transfer.reported",
    "transfer.withheld",
    "transfer.failed",
    "cache.reset",
    "worker.late",
    "engine.crash",
    "engine.stall",
    "thread.died",
    "engine.lifecycle",
    "plan",
    "run.end",
    "profile.expectation",
    "profile.repaired",
    "store.damaged",
    "soak.grown",
    "soak.shrunk",
    "soak.served",
    "restart.grown",
    "case.expectation",
}
"""Kinds of events that an excerpt shows, if they concern its request or no request."""

LIFE = {"request.new", "lookup", "alloc", "req.state", "req.finished", "hold", "release"}
"""Kinds of events in the life of a request, without its single steps."""

RELEASING = ("req.finished", "hold", "release", "transfer.reported")
"""Kinds of events by which the blocks of a request get free."""

STEP = ("new", "cached", "resumed", "preempted", "finished")
"""The fields of step.scheduled that name requests."""

LEAST = 3
"""Events per request that was left over; if they do not all fit, the first requests are shown."""


def is_noise(event: Event) -> bool:
    """Return whether an event says nothing to a reader, unless it is the violation itself.

    These are expectations that hold, and all but the last event of a reset.
    """
    kind = event["kind"]
    if kind == "case.expectation":
        return bool(event["holds"])
    if kind in ("profile.expectation", "profile.repaired"):
        return bool(event["reloadable"] >= event["promised"])
    if kind == "cache.reset":
        refused = event["phase"] == "returned" and event["returned"] is False
        return event["phase"] != "done" and not refused
    return False


def excerpt(trace: list[Event], seq: int, req: str | None) -> list[Event]:
    """Return the events that led to the violation at `seq`, and a few after it, in order.

    These concern its request `req`, or those that the event names, the steps, or what its worker
    did. For wrong bytes of another place, the admissions, preemptions, resumptions, saves and the
    steps of these saves of the request there are added. For something left over at the end, the
    lives of the requests that it belongs to are added. For KV that did not come back, the steps
    that computed it, and its saves. For an incomplete load, the loads that failed in its step.
    """
    event = next(e for e in trace if e["seq"] == seq)
    left = _left_over(trace, event) if event["kind"] == "run.end" else []
    named = event.get("req")
    several = set(named) if isinstance(named, list) else set()
    mine = several or ({req} if req is not None else set(left))
    chosen = [e for e in trace if e["seq"] == seq or _shown(e, event, mine)]
    last = EXCERPT // 2 if left else EXCERPT
    before = [e for e in chosen if e["seq"] <= seq][-last:]
    there = {e["seq"] for e in before}
    behind = [
        *_of_origin(trace, event),
        *_of_claimed(trace, event),
        *_outlived(trace, event),
        *_not_brought_back(trace, event),
        *_failed_beside(trace, event),
    ]
    origin = [e for e in behind if e["seq"] < seq and e["seq"] not in there]
    lives = [e for e in _lives(trace, left, seq) if e["seq"] not in there]
    earlier = lives + origin[-ORIGIN:] + before
    told = [e for e in _identities(trace, earlier, mine) if e["seq"] < seq]
    story = sorted(told + earlier, key=lambda e: e["seq"])
    later = [
        e
        for e in chosen
        if e["seq"] > seq
        and e["step"] == event["step"]
        and not e["kind"] == event["kind"] == "kv.wrong"
    ]
    return story + later[:AFTER]


def _identities(trace: list[Event], chosen: list[Event], mine: set[str]) -> Iterator[Event]:
    """Yield what tells the requests apart that an excerpt is about, if it is more than tokens."""
    about = {e["req"] for e in chosen if isinstance(e.get("req"), str)}
    about |= {e["of"] for e in chosen if e["kind"] == "lookup.namesake"}
    about |= {e["origin_req"] for e in chosen if e["kind"] == "kv.wrong"}
    for e in trace:
        if e["kind"] == "request.identity" and e["req"] in about | mine:
            yield e


def _shown(e: Event, violation: Event, mine: set[str]) -> bool:
    """Return whether an excerpt about the requests `mine` may show an event."""
    kind = e["kind"]
    if kind == "hook.returned":
        return e["error"] is not None
    if kind not in SHOWN or is_noise(e) or (mine and not _about(e, mine)):
        return False
    if kind == "engine.lifecycle" and e["op"] == "start":
        return bool(e.get("error"))
    if kind == "step.scheduled" and mine and violation["kind"] != "run.end":
        return any(not mine.isdisjoint(e.get(name) or ()) for name in STEP)
    if kind == "req.state" and e.get("from") == "WAITING" and e["to"] == "RUNNING":
        return False  # its step says so
    if kind == "kv.wrong" == violation["kind"]:
        return bool(e.get("layer") == violation.get("layer"))  # others repeat it layer by layer
    return True


def _about(event: Event, mine: set[str]) -> bool:
    """Return whether the event concerns one of these requests, or no request."""
    who = event.get("req")
    return who is None or not mine.isdisjoint(who if isinstance(who, list) else [who])


def _left_over(trace: list[Event], end: Event) -> list[str]:
    """Return the requests that were left over at the end of a run, without repetition.

    They are unfinished, or their Request object is still referenced, or they had blocks that are
    not free.
    """
    found = [*end["engine_requests"], *end["request_objects_alive"]]
    if end["free_blocks"] != end["free_blocks_at_start"]:
        found += _holders(trace, end)
    return list(dict.fromkeys(found))


def _holders(trace: list[Event], end: Event) -> list[str]:
    """Return the requests that had the blocks which are not free, since these were last free."""
    held: dict[int, list[str]] = {}
    for e in trace:
        if e.get("on") != end.get("on"):
            continue
        if is_restart(e):
            held.clear()  # the engine has another pool
        elif e["kind"] == "block" and e["op"] == "alloc" and e["owner"] not in (None, NO_OWNER):
            held[e["id"]] = [e["owner"]]
        elif e["kind"] == "block" and e["op"] == "free" and e["ref"] == 0:
            held.pop(e["id"], None)
        elif e["kind"] == "req.finished":
            # With a local hit, it has blocks that were allocated for other requests.
            for block in {block for _, _, table, _ in e["tables"] for block in table if block != 0}:
                held.setdefault(block, []).append(e["req"])
    return [req for reqs in held.values() for req in reqs]


def _lives(trace: list[Event], reqs: list[str], seq: int) -> list[Event]:
    """Return the lives of these requests before `seq`.

    Of a long life, only the beginning and the end are returned; of many requests, the first ones.
    """
    reqs = reqs[: EXCERPT // LEAST]
    found: list[Event] = []
    for req in reqs:
        mine = [e for e in trace if e["kind"] in LIFE and e["seq"] < seq and e["req"] == req]
        size = EXCERPT // len(reqs)
        if len(mine) > size:
            mine = mine[: size // 2] + mine[size // 2 - size :]
        found += mine
    return found


def _of_origin(trace: list[Event], event: Event) -> list[Event]:
    """Return the events about where the wrong bytes of `event` come from.

    These are the admissions, preemptions and resumptions of the request that the bytes were
    computed for, and of the one that `tell` names, the saves of both around the position, and the
    steps in which these saves were made, or the position was computed, and the failed loads before
    it if that made it wrong. For poison that was taken too early, they are what happened to its
    block, as far as that is known.
    """
    place = source(event)
    if place is None:
        return _of_block(trace, event)
    req, pos = place
    reqs = [req]
    story = tell(trace, event)
    if story is not None:
        reqs.append(story.req)
    first = min(pos, event["pos"])
    last = max(pos, event["pos"])

    def saves(e: Event) -> bool:
        around = e["kind"] == "plan" and e["start"] <= last and first < e["end"]
        return around and e["op"] == "save" and e["req"] in reqs

    saved = {(e["req"], e["step"]) for e in trace if saves(e)}
    # When a block went from the request that had it to the one whose KV was read from it.
    handed_on = story.req if story is not None and story.req != req else None

    def concerns(e: Event) -> bool:
        if e["kind"] in RELEASING and e["req"] == handed_on:
            return e["kind"] == "req.finished" or e["direction"] == "send"
        if e["kind"] == "req.state":
            return "PREEMPTED" in (e["from"], e["to"])
        if e["kind"] == "load.due":
            return event.get("found") == "on_failed_load" and e["reported_failed"]
        if e["kind"] == "req.scheduled":
            computes = e.get("computed", 0) <= pos < e.get("computed", 0) + e.get("scheduled", 0)
            return (
                e["listed_as"] in ("new", "resumed") or computes or (e["req"], e["step"]) in saved
            )
        return saves(e)

    return [e for e in trace if e.get("req") in reqs and concerns(e)]


def _not_brought_back(trace: list[Event], event: Event) -> list[Event]:
    """Return the steps that computed the KV that should have come back and did not, and its saves.

    Nothing for other events than promises of a reload.
    """
    if event["kind"] not in ("profile.expectation", "profile.repaired"):
        return []
    first, end = event["reloadable"], event["promised"]

    def concerns(e: Event) -> bool:
        if e["kind"] == "req.scheduled":
            return bool(e["computed"] < end and first < e["computed"] + e["scheduled"])
        if e["kind"] == "plan":
            return bool(e["op"] == "save" and e["start"] < end and first < e["end"])
        return e["kind"] == "req.finished"

    return [e for e in trace if e.get("req") == event["of"] and concerns(e)]


def computed_in(trace: list[Event], event: Event) -> str | None:
    """Return in words in which steps the KV was computed that did not come back.

    None for other events than promises of a reload, and if the promise was kept.
    """
    rows = [
        e["step"]
        for e in _not_brought_back(trace, event)
        if e["kind"] == "req.scheduled" and e["seq"] < event["seq"]
    ]
    if not rows:
        return None
    where = f"step {rows[0]}" if len(rows) == 1 else f"steps {rows[0]} to {rows[-1]}"
    which = "the others" if event["reloadable"] else "them"
    return f"{event['of']} computed {which} in {where}"


def claimed(trace: Iterable[Event], event: Event) -> tuple[str, str] | None:
    """Return the request whose KV a lookup claims and must not, and how that is known, in words.

    None for other events, and where no request is known.
    """
    if event["kind"] == "lookup.permitted" and event["of"] is not None:
        return event["of"], f"the KV is that of request {event['of']}, which forbids to store it"
    if event["kind"] != "lookup":
        return None
    named = namesake_of(trace, event)
    return None if named is None else (named["of"], f"request {namesake(named)}")


def _of_claimed(trace: list[Event], event: Event) -> list[Event]:
    """Return when the request whose KV a lookup claims was computed, saved and finished."""
    found = claimed(trace, event)
    if found is None:
        return []
    kinds = ("plan", "req.scheduled", "req.finished")
    mine = [e for e in trace if e["kind"] in kinds and e["req"] == found[0]]
    return [
        e
        for e in mine
        if e["kind"] == "req.finished"
        or (e["kind"] == "plan" and e["op"] == "save")
        or e.get("listed_as") == "new"
    ]


def _failed_beside(trace: list[Event], event: Event) -> list[Event]:
    """Return which loads failed in the step in which another one is incomplete."""
    if event["kind"] != "load.due" or not event["missing"] or event["reported_failed"]:
        return []
    return [e for e in trace if e["kind"] == "transfer.failed" and e["step"] == event["step"]]


def _outlived(trace: list[Event], event: Event) -> list[Event]:
    """Return what was computed and saved before a lookup that claims KV from before a reset."""
    if event["kind"] != "lookup" or not event.get("computed_before_reset"):
        return []
    return [
        e
        for e in trace
        if e["kind"] in ("req.finished", "worker.late")
        or (e["kind"] == "plan" and e["op"] == "save")
        or (e["kind"] == "req.scheduled" and e["listed_as"] in ("new", "resumed"))
    ]


def _of_block(trace: list[Event], event: Event) -> list[Event]:
    """Return what happened to the block that poison was read from; nothing for other events.

    When requests got it and lost it, the loads into it that failed, and the steps in which its
    owner had it in the right place and not computed the position.
    """
    owner = event.get("origin_req")
    if owner is None or event["found"] != "never_computed":
        return []
    pos = event["pos"]
    index = pos // block_size_at(trace, event)
    block = event.get("origin_block")
    holders: set[tuple[Any, Any]] = set()
    found = []
    for e in trace:
        who = e.get("req"), e.get("generation")
        if e["kind"] == "req.scheduled":
            here = e["table"][index : index + 1]
            early = who[0] == owner and here and e["computed"] + e["scheduled"] <= pos
            got = block in e["table"] and who not in holders
            if got:
                holders.add(who)
            if got or (early and block in (None, *here)):
                found.append(e)
        elif e["kind"] == "req.state" and e["to"] == "PREEMPTED" and who in holders:
            holders.discard(who)  # it may get the block again
            found.append(e)
        elif (e["kind"] == "req.finished" and who in holders) or (
            e["kind"] == "transfer.failed" and block in e["blocks"]
        ):
            found.append(e)
    return found
