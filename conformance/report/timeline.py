# SPDX-License-Identifier: Apache-2.0
"""A trace as text: one line per event that tells something, the hooks of a stretch joined on one line, columns `step  what  about`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Event = dict[str, Any]
WIDTH = 118
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


def render(events: Iterable[Event], mark: int | None = None) -> list[str]:
    """The lines for a trace, or for an excerpt of one. Events that say nothing by themselves are left out; the one with `seq` mark is
    always there, with `>` in front."""
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
        lines += [">" + found[0][1:], *found[1:]] if marked else found
    _flush(lines, hooks, place)
    return lines


def _flush(lines: list[str], hooks: list[str], place: tuple[int, str]) -> None:
    if hooks:
        lines += _line(place[0], place[1], " ".join(_runs(hooks)))
        hooks.clear()


def _runs(names: Sequence[str]) -> list[str]:
    """Repeated names, and repeated pairs, as `name*3` and `(one two)*3`."""
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


def _line(step: int, what: str, text: str) -> list[str]:
    """The line, wrapped under its own column."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{step:>4}  {what:<11} ",
        subsequent_indent=" " * 18,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [f"{step:>4}  {what}"]


def about(event: Event) -> tuple[str, str] | None:
    """(what, text) of an event; None if it has nothing to tell."""
    kind = event["kind"]
    if kind in _QUIET:
        return None
    special = _SPECIAL.get(kind)
    if special is not None:
        return special(event)
    return plain(event)


def plain(event: Event) -> tuple[str, str]:
    """(what, fields) of any event."""
    kind = event["kind"]
    return kind.rpartition(".")[2] if len(kind) > 11 else kind, _fields(event)


def _fields(event: Event, skip: Iterable[str] = ()) -> str:
    """`name=value` of the fields that say something."""
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
    """`[1,2,3,7]` as `1-3,7`; keeps the order."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return "[" + ",".join("-".join(map(str, part)) for part in parts) + "]"


def _start(e: Event) -> tuple[str, str]:
    return (
        "start",
        f"{e['case']} {e['engine']} {e['scheduling']} {e['runner']} depth={e['depth']} block_size={e['block_size']} seed={e['seed']}",
    )


def _step(e: Event) -> tuple[str, str] | None:
    parts = [
        f"{name}={','.join(e[name])}"
        for name in ("new", "cached", "resumed", "preempted", "finished")
        if e[name]
    ]
    flags = [
        text
        for name, text in (
            ("has_sync_loads", "loads before the forward pass"),
            ("empty", "no tokens"),
        )
        if e[name]
    ]
    return "schedule", " ".join([f"{e['total']} tokens", *parts, *flags])


def _scheduled(e: Event) -> tuple[str, str]:
    drafts = f" drafts={e['drafts']}" if e["drafts"] else ""
    blocks = ranges(e["table"])
    return (
        f"  {e['req']}",
        f"{e['listed_as']:<8} computed={e['computed']} scheduled={e['scheduled']} placeholders={e['placeholders']} known={e['known']}{drafts} blocks={blocks}",
    )


def _lookup(e: Event) -> tuple[str, str]:
    answer = (
        "asks again later"
        if e["tokens"] is None
        else f"{e['tokens']} tokens" + (", asynchronously" if e["is_async"] else "")
    )
    return "lookup", f"{e['req']} local={e['local']} of known={e['known']} -> {answer}"


def _alloc(e: Event) -> tuple[str, str]:
    how = " (asynchronous)" if e["is_async"] else ""
    again = " second call" if e["second_call"] else ""
    return (
        "alloc",
        f"{e['req']} computed={e['computed']} local={e['local']} external={e['external']}{how} blocks={_tables(e)}{again}",
    )


def _tables(e: Event) -> str:
    """The block tables of an allocation, one per group: `[1-4] [5,0]`."""
    return " ".join(ranges(table[2]) for table in e.get("tables", ())) or ranges(e["blocks"])


def _of(e: Event) -> str:
    return f"{e['layer']}" + (f" of group {e['group']}" if e.get("group") is not None else "")


def _state(e: Event) -> tuple[str, str]:
    return (
        "state",
        f"{e['req']} {e['from'] or '-'} -> {e['to']} ({e['reason']}) computed={e['computed']} placeholders={e['placeholders']} known={e['known']}",
    )


def _wrong(e: Event) -> tuple[str, str]:
    where = (
        f"position {e['pos']}"
        if e["count"] == 1
        else f"positions {e['pos']}-{e['pos'] + e['count'] - 1}"
    )
    return (
        "WRONG KV",
        f"{e['req']} {where} of {_of(e)} ({e['kv']}), via {e['via']}: {e['found']}: {e['origin']}",
    )


def _due(e: Event) -> tuple[str, str]:
    parts = [f"{e['req']} granted={e['granted']}"]
    parts += [f"{name}={ranges(e[name])}" for name in ("missing", "wrong") if e[name]]
    parts += [
        f"group {number} lacks {ranges(positions)}"
        for number, _, positions, _ in e.get("by_group", ())
    ]
    return "load due", " ".join(parts) + (" reported as failed" if e["reported_failed"] else "")


def _returned(e: Event) -> tuple[str, str] | None:
    if e["error"] is None and not e["timed_out"]:
        return None
    return "RAISED", f"{e['hook']}: {e['error_text'] or e['error']}"


def _changed(e: Event) -> tuple[str, str] | None:
    kinds = (
        "shared",
        "over_computed",
        "null_block",
        "unallocated",
        "other_request",
        "not_transferred",
    )
    bad = [f"{name}={ranges(e[name])}" for name in kinds if e.get(name)]
    return (
        ("kv changed", f"after {e['after_hook']} in {_of(e)}: {' '.join(bad)} (slots)")
        if bad
        else None
    )


def _built(e: Event) -> tuple[str, str] | None:
    bad = [text for name, text in (("pickles", "does not pickle"),) if not e[name]]
    return ("metadata", ", ".join(bad) + f": {e['pickle_error']}") if bad else None


def _updated(e: Event) -> tuple[str, str]:
    return (
        "  landed",
        f"{e['req']} step {e['of_step']}: computed={e['computed']} placeholders={e['placeholders']} known={e['known']} {e['status']}",
    )


def _lifecycle(e: Event) -> tuple[str, str]:
    return "engine", e["op"] + (f" in process {e['pid']}" if e["pid"] else "") + (
        f": {e['error']}" if e["error"] else ""
    )


def _end(e: Event) -> tuple[str, str]:
    missing = e["free_blocks_at_start"] - e["free_blocks"]
    parts = [
        "" if e["quiesced"] else "work is left",
        f"unfinished {', '.join(map(str, e['unfinished']))}" if e["unfinished"] else "",
        f"{missing} blocks not free" if missing > 0 else "",
        f"requests still known to the engine: {', '.join(map(str, e['engine_requests']))}"
        if e["engine_requests"]
        else "",
        f"request objects still alive: {', '.join(map(str, e['request_objects_alive']))}"
        if e["request_objects_alive"]
        else "",
        f"{e['threads']} threads more than at the start" if e["threads"] > 0 else "",
    ]
    return "end", "of the run" if e["crashed"] or not any(parts) else "; ".join(
        part for part in parts if part
    )


_SPECIAL: dict[str, Callable[[Event], tuple[str, str] | None]] = {
    "run.start": _start,
    "step.scheduled": _step,
    "req.scheduled": _scheduled,
    "lookup": _lookup,
    "alloc": _alloc,
    "req.state": _state,
    "req.updated": _updated,
    "kv.wrong": _wrong,
    "kv.changed": _changed,
    "load.due": _due,
    "hook.returned": _returned,
    "meta.built": _built,
    "sample": lambda e: (
        "sample",
        f"{e['req']} output {e['index']} = {e['token']}"
        + ("" if e["clean"] else "  (from wrong KV)"),
    ),
    "req.finished": lambda e: (
        "finished",
        _fields(e, ("delayed",)) + (" blocks kept until sent" if e["delayed"] else ""),
    ),
    "engine.lifecycle": _lifecycle,
    "run.end": _end,
    "engine.crash": lambda e: ("CRASH", f"{e['hook'] or e['where']}: {e['error']}"),
    "engine.stall": lambda e: (
        "STALL",
        f"no progress in {e['steps']} steps; waiting: {', '.join(map(str, e['waiting_on']))}",
    ),
    "transfer.reported": lambda e: (
        "transfer",
        f"{e['req']} {e['direction']} finished" + ("" if e["held"] else " (nobody waited for it)"),
    ),
    "plan": lambda e: ("plan", f"{e['op']} {e['req']} [{e['start']}, {e['end']}) {e['timing']}"),
    "api": lambda e: (
        None if e["ok"] else ("api", f"{e['item']}: {e['detail'] or 'not as the interface has it'}")
    ),
}
