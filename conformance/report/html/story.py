# SPDX-License-Identifier: Apache-2.0
"""What a timeline shows of one run: lanes, cells, hooks, transfers and wrong bytes, taken from its trace. JSON throughout.

A story is a dict of short lists, so that a page can hold dozens of them (`build` makes it); `pack` makes text of it.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from kvconform.judge.backtrace import source
from kvconform.judge.verdict import Row, Verdict
from kvconform.report import timeline
from kvconform.report.html.lanes import Lanes

Event = dict[str, Any]
LONGEST = 12_000
"""Events of one story. Of a longer trace, those around the first failure are kept: what is before 10,000 events has never told anything."""
_TAKEN = re.compile(r"before request (\S+) had computed")


def build(trace: Sequence[Event], marks: dict[str, int]) -> dict[str, Any]:
    """The story of a trace. `marks`: requirement -> seq of its first violation. Changes nothing."""
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
        "run": {
            name: first.get(name)
            for name in (
                "case",
                "engine",
                "scheduling",
                "runner",
                "depth",
                "block_size",
                "num_blocks",
                "seed",
            )
        },
        "first": events[0]["step"] if events else 0,
        "steps": max((event["step"] for event in events), default=0),
        "requests": lanes.names,
        "cells": lanes.cells,
        "states": lanes.states,
        "spans": lanes.ended(),
        "hooks": hooks,
        "names": list(names),
        "wrong": _joined(wrong),
        "lines": _lines(events, lanes, marks),
        "marks": marks,
        "left_out": len(trace) - len(events),
    }


def story_of(trace: Sequence[Event], rows: Iterable[Row]) -> str | None:
    """The packed story of a run of which something failed; None otherwise."""
    failed = [row for row in rows if row.verdict is Verdict.FAIL]
    return (
        pack(build(trace, {row.requirement: row.event for row in failed if row.event is not None}))
        if failed
        else None
    )


def pack(story: dict[str, Any]) -> str:
    """As text: JSON, zlib, base64. `unpack` is its inverse; so is story.js."""
    text = json.dumps(story, separators=(",", ":"), ensure_ascii=False).encode(
        errors="backslashreplace"
    )
    return base64.b64encode(zlib.compress(text, 9)).decode()


def unpack(text: str) -> dict[str, Any]:
    """The story that `pack` made text of. ValueError for anything else."""
    try:
        found = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except (ValueError, zlib.error) as error:
        raise ValueError(f"not a story: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("not a story")
    return found


def _part(trace: Sequence[Event], marks: dict[str, int]) -> Sequence[Event]:
    if len(trace) <= LONGEST:
        return trace
    middle = min(marks.values(), default=len(trace))
    end = min(len(trace), max(middle + LONGEST // 6, LONGEST))
    return trace[end - LONGEST : end]


def _lines(events: Iterable[Event], lanes: Lanes, marks: dict[str, int]) -> list[list[Any]]:
    """[seq, step, what, text, lane or -1] of every event that tells something by itself."""
    marked = set(marks.values())
    found = []
    for event in events:
        told = timeline.about(event) or (timeline.plain(event) if event["seq"] in marked else None)
        if told is not None and (event["kind"] != "hook.called" or event["seq"] in marked):
            found.append(
                [event["seq"], event["step"], told[0].strip(), told[1], lanes.number(event)]
            )
    return found


def _wrong(event: Event, lanes: Lanes) -> list[Any]:
    """[lane, step, seq, first position, count, what it holds, in words, lane and step of the origin or -1]."""
    place = source(event)
    if place is None and (found := _TAKEN.search(str(event["origin"] or ""))):
        place = (found[1], event["pos"])
    lane, step = (
        lanes.written(place[0], place[1], event.get("on")) if place is not None else (-1, -1)
    )
    return [
        lanes.number(event),
        event["step"],
        event["seq"],
        event["pos"],
        event["count"],
        event["found"],
        event["origin"] or "",
        lane,
        step,
    ]


def _joined(wrong: list[list[Any]]) -> list[list[Any]]:
    """One entry where several layers have the same to say."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for one in wrong:
        found.setdefault((one[0], one[1], one[3], one[4], one[5]), one)
    return list(found.values())
