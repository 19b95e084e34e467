# SPDX-License-Identifier: Apache-2.0
"""Renders a trace as text, in the columns `step  what  text`.

Each informative event has a line; consecutive hook calls share one. `fit` wraps the lines to the
width of what shows them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvconform.contract.events import WRITES
from kvconform.contract.steps import DISK_FULL
from kvconform.contract.trace import Event
from kvconform.judge.backtrace import is_noise
from kvconform.judge.describe import changed_argument, describe, namesake, spans
from kvconform.judge.identity import told_apart_by
from kvconform.words import many

WIDTH = 118
"""Width of the lines where nothing else is known."""
GAP = "      ..."
"""Line in the place of events that are left out."""
_WHAT = 11
"""Width of the column `what`."""
_QUIET = {
    "block",
    "worker.step_begin",
    "worker.step_end",
    "layer.wait",
    "layer.save",
    "kv.computed",
    "meta.bound",
    "meta.cleared",
}
"""Kinds of events that are not informative by themselves."""


def render(events: Iterable[Event], mark: int | None = None) -> list[str]:
    """Return the lines for a trace or an excerpt of one, each of any length.

    Events that are not informative are left out. The event whose `seq` is `mark` is always
    included, with a leading `>`.
    """
    lines: list[str] = []
    hooks: list[str] = []
    place: tuple[int, str] = (0, "")
    for event in events:
        marked = mark is not None and event.get("seq") == mark
        if event["kind"] == "hook.called" and not marked:
            if event["depth"] == 0:
                here = (event["step"], event["half"])
                if here != place:
                    _flush(lines, hooks, place)
                    place = here
                hooks.append(event["hook"])
            continue
        text = about(event) or (plain(event) if marked else None)
        if text is None:
            continue
        _flush(lines, hooks, place)
        found = _line(event["step"], *text)
        lines.append(">" + found[1:] if marked else found)
    _flush(lines, hooks, place)
    return lines


def _flush(lines: list[str], hooks: list[str], place: tuple[int, str]) -> None:
    """Move the collected hooks to a line of their own; `place` is their step and half."""
    if hooks:
        lines.append(_line(place[0], place[1], " ".join(_runs(hooks))))
        hooks.clear()


def _runs(names: Sequence[str]) -> list[str]:
    """Return the names, with repeated names and pairs shortened to `name*3` and `(one two)*3`."""
    found: list[str] = []
    position = 0
    while position < len(names):
        for length in (1, 2):
            group = list(names[position : position + length])
            count = 1
            while list(names[position + count * length : position + (count + 1) * length]) == group:
                count += 1
            if count > 1:
                text = group[0] if length == 1 else f"({' '.join(group)})"
                found.append(f"{text}*{count}")
                position += count * length
                break
        else:
            found.append(names[position])
            position += 1
    return found


def _line(step: int, what: str, text: str) -> str:
    """Return the line of an event."""
    return f"{step:>4}  {what:<{_WHAT}} {text}".rstrip()


def fit(lines: Iterable[str], width: int = WIDTH) -> list[str]:
    """Wrap lines within their last column. Words, such as the names of hooks, stay whole."""
    return [
        part
        for line in lines
        for part in textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * (_WHAT + 7),
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def shorten(lines: Sequence[str], width: int, most: int) -> list[str]:
    """Return lines of an excerpt that take at most `most` lines when they are wrapped, in order.

    The violation is kept, and what is next to it and at the beginning, where the story begins; a
    gap is marked.
    """
    sizes = [len(fit([line], width)) for line in lines]
    if sum(sizes) <= most:
        return list(lines)
    mark = next((n for n, line in enumerate(lines) if line.startswith(">")), len(lines) - 1)
    pairs = zip(range(mark - 1, -1, -1), range(mark), strict=True)
    kept = {mark}
    room = most - sizes[mark] - 1
    for number in dict.fromkeys(n for pair in pairs for n in pair):
        if sizes[number] > room:
            break
        room -= sizes[number]
        kept.add(number)
    shown: list[str] = []
    for number, line in enumerate(lines[: mark + 1]):
        if number in kept:
            shown.append(line)
        elif shown[-1:] != [GAP]:
            shown.append(GAP)
    return shown


def about(event: Event) -> tuple[str, str] | None:
    """Return (what, text) of an event; None if it is not informative."""
    kind = event["kind"]
    if kind in _QUIET or is_noise(event):
        return None
    special = _SPECIAL.get(kind)
    if special is not None:
        return special(event)
    return plain(event)


def plain(event: Event) -> tuple[str, str]:
    """Return (what, fields) of any event."""
    kind = event["kind"]
    what = kind.rpartition(".")[2] if len(kind) > _WHAT else kind
    return what, _fields(event)


def _fields(event: Event, skip: Iterable[str] = ()) -> str:
    """Return `name=value` for each field that is neither None nor empty."""
    hidden = {"kind", "seq", "step", "generation", *skip}
    return " ".join(
        f"{name}={_short(value)}"
        for name, value in event.items()
        if name not in hidden and value not in (None, [], {})
    )


def _short(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return ranges(value)
    text = str(value)
    return text if len(text) <= 70 else text[:67] + "..."


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers with consecutive ones joined, in their order: 1, 2, 3, 7 as `[1-3,7]`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return "[" + ",".join("-".join(map(str, part)) for part in parts) + "]"


def _start(e: Event) -> tuple[str, str]:
    axes = f"{e['engine']} {e['scheduling']} {e['runner']}"
    sizes = f"depth={e['depth']} block_size={e['block_size']}"
    device = "" if e["device"] == "cpu" else f" device={e['device']}"
    return "start", f"{e['case']} {axes} {sizes} seed={e['seed']}{device}"


def _step(e: Event) -> tuple[str, str]:
    parts = [many(e["total"], "token")]
    for name in ("new", "cached", "resumed", "preempted", "finished"):
        if e[name]:
            parts.append(f"{name}={','.join(e[name])}")
    if e["has_sync_loads"]:
        parts.append("loads before the forward pass")
    if e["empty"]:
        parts.append("no tokens")
    return "schedule", " ".join(parts)


def _scheduled(e: Event) -> tuple[str, str]:
    parts = [f"{e['listed_as']:<8} {_counters(e)}"]
    if e["drafts"]:
        parts.append(f"drafts={e['drafts']}")
    parts.append(f"blocks={ranges(e['table'])}")
    return f"  {e['req']}", " ".join(parts)


def _interrupted(e: Event) -> tuple[str, str]:
    blocks = f" blocks={ranges(e['table'])}" if e["table"] else ""
    return f"  {e['req']}", f"as {e['hook']} saw it: {_counters(e)}{blocks}"


def _counters(e: Event) -> str:
    """Return the counters of a request; those that are nearly always zero only if they are not."""
    parts = [f"computed={e['computed']}"]
    if e.get("scheduled") is not None:
        parts.append(f"scheduled={e['scheduled']}")
    if e["placeholders"]:
        parts.append(f"placeholders={e['placeholders']}")
    return " ".join([*parts, f"known={e['known']}"])


def _lookup(e: Event) -> tuple[str, str]:
    answer = "asks again later"
    if e["tokens"] is not None:
        answer = many(e["tokens"], "token") + (", asynchronously" if e["is_async"] else "")
    return "lookup", f"{e['req']} local={e['local']} of known={e['known']} -> {answer}"


def _alloc(e: Event) -> tuple[str, str]:
    how = " (asynchronous)" if e["is_async"] else ""
    again = " second call" if e["second_call"] else ""
    tokens = f"computed={e['computed']} local={e['local']} external={e['external']}"
    return "alloc", f"{e['req']} {tokens}{how} blocks={_tables(e)}{again}"


def _tables(e: Event) -> str:
    """Return the block tables of an allocation, one per group: `[1-4] [5,0]`."""
    return " ".join(ranges(table[2]) for table in e.get("tables", ())) or ranges(e["blocks"])


def _of(e: Event) -> str:
    """Return the layer of an event, and its KV cache group and its rank if they are known."""
    group = f" of group {e['group']}" if e.get("group") is not None else ""
    rank = f" rank {e['rank']}" if e.get("rank") is not None else ""
    return f"layer {e['layer']}{group}{rank}"


def _state(e: Event) -> tuple[str, str]:
    change = f"{e['from'] or '-'} -> {e['to']} ({e['reason']})"
    return "state", f"{e['req']} {change} {_counters(e)}"


def _wrong(e: Event) -> tuple[str, str]:
    where = f"position {e['pos']}"
    if e["count"] != 1:
        where = f"positions {e['pos']}-{e['pos'] + e['count'] - 1}"
    halves = "K and V" if e["kv"] == "both" else e["kv"].upper()
    place = f"{e['req']} {where}, {halves} of {_of(e)}"
    return "WRONG KV", f"{place}, via {e['via']}: {e['found']}: {e['origin']}"


def _due(e: Event) -> tuple[str, str]:
    parts = [f"{e['req']} granted={e['granted']}"]
    parts += [f"{name}={ranges(e[name])}" for name in ("missing", "wrong") if e[name]]
    parts += [
        f"group {number} lacks {ranges(positions)}"
        for number, _, positions, _ in e.get("by_group", ())
    ]
    if e.get("rank") is not None:
        parts.append(f"rank={e['rank']}")
    return "load due", " ".join(parts) + (" reported as failed" if e["reported_failed"] else "")


def _returned(e: Event) -> tuple[str, str] | None:
    if e["mutated_args"]:
        return "argument", changed_argument(e)
    if e["error"] is None and not e["timed_out"]:
        return None
    return "RAISED", f"{e['hook']}: {e['error_text'] or e['error']}"


def _changed(e: Event) -> tuple[str, str] | None:
    bad = [f"{name}={ranges(e[name])}" for name in WRITES if e.get(name)]
    if not bad:
        return None
    return "kv changed", f"after {e['after_hook']} in {_of(e)}: {' '.join(bad)} (slots)"


def _built(e: Event) -> tuple[str, str] | None:
    if e["block_state_kept"]:
        return "metadata", "holds kv_connector_block_state"
    if e["none"]:
        return "metadata", "None"
    return None if e["pickles"] else ("metadata", f"does not pickle: {e['pickle_error']}")


def _load_failed(e: Event) -> tuple[str, str]:
    blocks = "block" if len(e["blocks"]) == 1 else "blocks"
    what = f"{blocks} {spans(e['blocks'])}" if e["blocks"] else "the load"
    text = f"{what} of {e['req']}" if e["req"] is not None else what
    if e["outside_grant"]:
        text += f", of which {spans(e['outside_grant'])} belong to no load"
    return "failed", f"{text}, as the connector reports"


def _waits(e: Event) -> tuple[str, str]:
    waits = "waits" if e["kind"] == "hold" else "waits no longer"
    transfer = "load" if e["direction"] == "recv" else "send"
    return e["kind"], f"the engine {waits} for the {transfer} of {e['req']} ({e['cause']})"


def _new(e: Event) -> tuple[str, str]:
    return "request", f"{e['req']} is new, on_new_request was called"


def _namesake(e: Event) -> tuple[str, str]:
    return "namesake", namesake(e)


def _identity(e: Event) -> tuple[str, str]:
    return "request", f"{e['req']} has {told_apart_by(e)}"


def _permitted(e: Event) -> tuple[str, str]:
    return "permitted", f"{e['req']} up to token {e['allowed']}, claimed up to {e['end']}"


def _sources(e: Event) -> tuple[str, str]:
    return "sources", f"{e['req']} named={e['named']} needed={e['needed']} granted={e['granted']}"


def _updated(e: Event) -> tuple[str, str]:
    return "  landed", f"{e['req']} step {e['of_step']}: {_counters(e)} {e['status']}"


def _lifecycle(e: Event) -> tuple[str, str]:
    process = f" in process {e['pid']}" if e["pid"] else ""
    error = f": {e['error']}" if e["error"] else ""
    return "engine", f"{e['op']}{process}{error}"


def _end(e: Event) -> tuple[str, str]:
    missing = e["free_blocks_at_start"] - e["free_blocks"]
    parts = []
    if not e["quiesced"]:
        parts.append("work is left")
    if e["unfinished"]:
        parts.append(f"unfinished {_listed(e['unfinished'])}")
    if missing > 0:
        parts.append(f"{many(missing, 'block')} not free")
    if e["engine_requests"]:
        parts.append(f"requests still known to the engine: {_listed(e['engine_requests'])}")
    if e["request_objects_alive"]:
        parts.append(f"request objects still alive: {_listed(e['request_objects_alive'])}")
    if e["threads"] > 0:
        parts.append(f"{many(e['threads'], 'thread')} more than at the start")
    return "end", "of the run" if e["crashed"] or not parts else "; ".join(parts)


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _sample(e: Event) -> tuple[str, str]:
    source = "" if e["clean"] else "  (from wrong KV)"
    return "sample", f"{e['req']} output {e['index']} = {e['token']}{source}"


def _finished(e: Event) -> tuple[str, str]:
    delayed = ", blocks kept until sent" if e["delayed"] else ""
    hook = f", {e['hook']} was called" if e["hook"] else ""
    return "finished", f"{e['req']} {e['status']} {_counters(e)}{hook}{delayed}"


def _crash(e: Event) -> tuple[str, str]:
    return "CRASH", f"{e['hook'] or e['where']}: {e['error']}"


def _died(e: Event) -> tuple[str, str]:
    return "THREAD", f"{e['thread']} ended in step {e['in_step']}: {e['error']}"


def _stall(e: Event) -> tuple[str, str]:
    said = f"no progress in {many(e['steps'], 'step')} and {e['limit']:g} s (stall_seconds)"
    alive = ""
    if e["threads"]:
        alive = f"; {many(e['threads'], 'thread')} of the connector still running"
    return "STALL", f"{said}{alive}; waiting: {_listed(e['waiting_on'])}"


def _clock(e: Event) -> tuple[str, str]:
    return "clock", f"set forward by {e['seconds']:g} s ({e['why']})"


def _late(e: Event) -> tuple[str, str]:
    return "workers", f"take up step {e['of_step']} only now"


def _reset(e: Event) -> tuple[str, str]:
    if e["phase"] not in ("done", "returned"):
        return "reset", f"{e['phase']} (connector={e['connector']})"
    if e["phase"] == "returned":
        return "reset", f"reset_cache of the connector returned {e['returned']}"
    caches = "the prefix cache and the connector's" if e["connector"] else "the prefix cache"
    refused = "" if e["returned"] else ": reset_prefix_cache returned False"
    return "reset", f"{caches}{refused}"


def _expected(e: Event) -> tuple[str, str]:
    return "case", f"expects {e['what']}" + (f": {e['detail']}" if e["detail"] else "")


def _promise(e: Event) -> tuple[str, str]:
    when = ", resumed," if e["resumed"] else ""
    again = " after a restart" if e["restarted"] else ""
    tokens = f"{e['reloadable']} of {many(e['promised'], 'token')} can be loaded"
    return "promise", f"{e['req']}{when} repeats {e['of']}{again}: {tokens}"


def _repaired(e: Event) -> tuple[str, str]:
    tokens = f"{e['reloadable']} of {many(e['promised'], 'token')} can be loaded"
    return "promise", f"{e['req']} repeats {e['of']}, whose load failed: {tokens}"


def _damaged(e: Event) -> tuple[str, str]:
    if e["what"] == DISK_FULL:
        return "damage", "the disk is full"
    return "damage", f"{e['count']} of the connector's files or servers: {e['what']}"


def _reported(e: Event) -> tuple[str, str]:
    unexpected = "" if e["held"] else " (the engine did not wait for it)"
    return "transfer", f"{e['req']} {e['direction']} finished{unexpected}"


def _withheld(e: Event) -> tuple[str, str]:
    return "transfer", f"{e['req']} {e['direction']} finished, kept back by the scheduler half"


def _controlled(e: Event) -> tuple[str, str]:
    to = "" if e["to"] is None else f" to the {e['to']} level"
    return "control", f"{e['do']} {e['of']}{to}: {e['before']} tokens before, {e['after']} after"


def _of_pair(e: Event) -> tuple[str, str]:
    words = {"pair.lookup": "asked", "pair.params": "handed", "pair.request": "in the end"}
    return words[e["kind"]], str(describe(e))


def _cache_lookup(e: Event) -> tuple[str, str]:
    return "in cache", f"{e['req']} {e['cached']} tokens by level, usable up to {e['usable']}"


def _cache_state(e: Event) -> tuple[str, str]:
    levels = (
        f"{level['entries']}" + ("" if level["bound"] is None else f"/{level['bound']}")
        for level in e["levels"]
    )
    return "cache", f"{many(e['held'], 'hold')}, entries by level {', '.join(levels)}"


def _cache_size(e: Event) -> tuple[str, str]:
    return "cache", f"{e['level']} has {many(e['bytes'], 'byte')}, of {e['kv']} in the engine"


def _plan(e: Event) -> tuple[str, str]:
    return "plan", f"{e['op']} {e['req']} [{e['start']}, {e['end']}) {e['timing']}"


def _api(e: Event) -> tuple[str, str] | None:
    if e["ok"]:
        return None
    return "api", f"{e['item']}: {e['detail'] or 'differs from the interface'}"


_SPECIAL: dict[str, Callable[[Event], tuple[str, str] | None]] = {
    "run.start": _start,
    "step.scheduled": _step,
    "req.scheduled": _scheduled,
    "lookup": _lookup,
    "request.new": _new,
    "transfer.failed": _load_failed,
    "hold": _waits,
    "release": _waits,
    "request.identity": _identity,
    "lookup.namesake": _namesake,
    "lookup.permitted": _permitted,
    "hit.sources": _sources,
    "alloc": _alloc,
    "req.state": _state,
    "req.updated": _updated,
    "kv.wrong": _wrong,
    "kv.changed": _changed,
    "load.due": _due,
    "hook.returned": _returned,
    "meta.built": _built,
    "sample": _sample,
    "req.finished": _finished,
    "engine.lifecycle": _lifecycle,
    "run.end": _end,
    "engine.crash": _crash,
    "engine.stall": _stall,
    "thread.died": _died,
    "clock.advanced": _clock,
    "store.damaged": _damaged,
    "transfer.reported": _reported,
    "transfer.withheld": _withheld,
    "plan": _plan,
    "control.done": _controlled,
    "pair.lookup": _of_pair,
    "pair.params": _of_pair,
    "pair.request": _of_pair,
    "cache.lookup": _cache_lookup,
    "cache.state": _cache_state,
    "cache.ended": _cache_state,
    "cache.size": _cache_size,
    "api": _api,
    "cache.reset": _reset,
    "worker.late": _late,
    "case.expectation": _expected,
    "profile.expectation": _promise,
    "profile.repaired": _repaired,
    "req.interrupted": _interrupted,
}
"""What describes an event, per kind of event; other kinds are described by their fields."""
