# SPDX-License-Identifier: Apache-2.0
"""Stories: the data of the timelines in report.html, one per failed run.

A story contains lanes, cells, hooks, transfers and wrong bytes of a run, taken from its trace. It
is a JSON object of short lists, so that a page can contain dozens of them. `build` makes a story,
`pack` encodes it as text.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from kvconform.contract.trace import Event
from kvconform.judge.backtrace import source, tell
from kvconform.judge.describe import kv_found
from kvconform.judge.records import Row, Verdict
from kvconform.report import timeline
from kvconform.report.html.lanes import Lanes

LONGEST = 12_000
"""Largest number of events of a story.

Of a longer trace, the events around the first failure are included: events more than 10,000 before
a failure have never explained it.
"""
TOLD = 40
"""Number of wrong bytes of a story whose earlier place is searched for."""
FACTS = ("case", "engine", "scheduling", "runner", "depth", "block_size", "num_blocks", "seed")
"""Fields of the event `run.start` that a story contains."""


def build(trace: Sequence[Event], marks: dict[str, int]) -> dict[str, Any]:
    """Return the story of a trace. `marks`: requirement -> seq of its first violation."""
    events = _part(trace, marks)
    marks = {
        name: seq
        for name, seq in marks.items()
        if events and events[0]["seq"] <= seq <= events[-1]["seq"]
    }
    lanes = Lanes()
    hooks: list[list[Any]] = []
    names: dict[str, int] = {}
    errors = {
        e["called_seq"]: e["error_text"] or e["error"]
        for e in events
        if e["kind"] == "hook.returned" and (e["error"] or e["timed_out"])
    }
    wrong: list[list[Any]] = []
    for event in events:
        lanes.take(event)
        if event["kind"] == "hook.called" and event["depth"] == 0:
            number = names.setdefault(event["hook"], len(names))
            hooks.append(
                [
                    event["step"],
                    int(event["half"] == "worker"),
                    number,
                    event["seq"],
                    errors.get(event["seq"]),
                ]
            )
        elif event["kind"] == "kv.wrong":
            wrong.append(_wrong(event, lanes))
    first = trace[0] if trace else {}
    return {
        "run": {name: first.get(name) for name in FACTS},
        "first": events[0]["step"] if events else 0,
        "steps": max((event["step"] for event in events), default=0),
        "requests": lanes.names,
        "cells": lanes.cells,
        "states": lanes.states,
        "spans": lanes.ended(),
        "hooks": hooks,
        "names": list(names),
        "wrong": _with_backstories(_joined(wrong), trace),
        "lines": _lines(events, lanes, marks),
        "marks": marks,
        "left_out": len(trace) - len(events),
    }


def story_of(trace: Sequence[Event], rows: Iterable[Row]) -> str | None:
    """Return the packed story of a run in which a requirement failed; None for other runs."""
    failed = [row for row in rows if row.verdict is Verdict.FAIL]
    if not failed:
        return None
    marks = {row.requirement: row.event for row in failed if row.event is not None}
    return pack(build(trace, marks))


def pack(story: dict[str, Any]) -> str:
    """Encode a story as text: JSON, zlib, base64. `unpack` and story.js decode it."""
    text = json.dumps(story, separators=(",", ":"), ensure_ascii=False)
    data = text.encode(errors="backslashreplace")
    return base64.b64encode(zlib.compress(data, 9)).decode()


def unpack(text: str) -> dict[str, Any]:
    """Return the story that `pack` encoded. Raises ValueError for other text."""
    try:
        found = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except (ValueError, zlib.error) as error:
        raise ValueError(f"not a story: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("not a story")
    return found


def _part(trace: Sequence[Event], marks: dict[str, int]) -> Sequence[Event]:
    """Return at most LONGEST events, with those around the first mark."""
    if len(trace) <= LONGEST:
        return trace
    middle = min(marks.values(), default=len(trace))
    end = min(len(trace), max(middle + LONGEST // 6, LONGEST))
    return trace[end - LONGEST : end]


def _lines(events: Iterable[Event], lanes: Lanes, marks: dict[str, int]) -> list[list[Any]]:
    """Return [seq, step, what, text, lane or -1] of every informative or marked event."""
    marked_seqs = set(marks.values())
    found = []
    for event in events:
        marked = event["seq"] in marked_seqs
        line = timeline.about(event) or (timeline.plain(event) if marked else None)
        if line is None or (event["kind"] == "hook.called" and not marked):
            continue
        what, text = line
        found.append([event["seq"], event["step"], what.strip(), text, lanes.number(event)])
    return found


def _wrong(event: Event, lanes: Lanes) -> list[Any]:
    """Return the entry of an event `kv.wrong`.

    It is [lane, step, seq, first position, count, what the bytes are, where they come from, lane of
    the origin, step of the origin]; without a known origin, the last two are -1.
    """
    place = source(event)
    if place is None and event["origin_req"] is not None:
        # The request that had not computed the position yet.
        place = event["origin_req"], event["pos"]
    lane = -1
    step = -1
    if place is not None:
        lane, step = lanes.written(place[0], place[1], event.get("on"))
    return [
        lanes.number(event),
        event["step"],
        event["seq"],
        event["pos"],
        event["count"],
        kv_found(event["found"]),
        event["origin"] or "",
        lane,
        step,
    ]


def _joined(wrong: list[list[Any]]) -> list[list[Any]]:
    """Return the entries without those that differ in their layer only."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for one in wrong:
        found.setdefault((one[0], one[1], one[3], one[4], one[5]), one)
    return list(found.values())


def _with_backstories(wrong: list[list[Any]], trace: Sequence[Event]) -> list[list[Any]]:
    """Return the entries, each with where its bytes were before, in words; empty if unknown.

    Only the first TOLD are searched for: each search reads the trace from its beginning.
    """
    events = list(trace)
    known = bool(events) and events[0]["kind"] == "run.start"  # which has the size of a block
    wanted = {one[2] for one in wrong[:TOLD]} if known else set()
    stories = {event["seq"]: tell(events, event) for event in events if event["seq"] in wanted}
    texts = {seq: story.text for seq, story in stories.items() if story is not None}
    return [[*one, texts.get(one[2], "")] for one in wrong]
