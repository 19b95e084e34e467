# SPDX-License-Identifier: Apache-2.0
"""Joins what the processes of one live run wrote into one trace."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvconform.lost import note_unfilled

Event = dict[str, Any]
CHANNELS = frozenset({"hooks", "sched", "kv", "live"})
"""The channels that a live trace may have; `channels` says which it has. Nobody tells what happens on a device, or what is planned."""
REFERENCES = ("called_seq", "cause_seq")
"""Fields that hold the `seq` of another event of the same process."""


def collect(directory: Path, **start: Any) -> list[Event]:
    """The trace of all processes that wrote into `directory`, numbered from 0. `start` replaces fields of run.start.

    Events are in the order of their steps, as carried from process to process; within a step the scheduler's process comes first, then
    what the others did when they were given the step, then what was made of it. Empty if nobody wrote anything. Half a line at the end of
    a file is what a process was writing when it died.
    """
    processes = [events for path in sorted(directory.glob("*.jsonl")) if (events := read(path))]
    if not processes:
        return []
    processes.sort(key=lambda events: not any(e["k"] == "run.start" for e in events))
    merged = _merge(processes)
    starts = [e for e in merged if e["k"] == "run.start"]
    ends = [e for e in merged if e["k"] == "run.end"]
    rest = [e for e in merged if e["k"] not in ("run.start", "run.end") or e is (ends[-1] if ends else None)]
    trace = [*({**e, **start} for e in starts[:1]), *rest]
    if starts and not ends:
        trace.append(_cut_short(trace))
    return _numbered(trace)


def channels(trace: Iterable[Event]) -> frozenset[str]:
    """The channels that a trace has: `kv` only where the workers could look at the KV, and with a connector `hooks`."""
    events = list(trace)
    looked = [e for e in events if e["k"] == "live.kv"]
    found = {"sched", "live"}
    if any(e["k"] == "hook.called" for e in events):
        found.add("hooks")
    if looked and all(e["watched"] and e["compared"] and e["poisoned"] for e in looked):
        found.add("kv")
    return frozenset(found)


def read(path: Path) -> list[Event]:
    """The events of one process, each as it came to be in the end."""
    latest: dict[int, Event] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # the process died while it wrote it
            event["_pid"] = path.stem
            latest[event["seq"]] = event
    return [latest[seq] for seq in sorted(latest)]


def _merge(processes: list[list[Event]]) -> list[Event]:
    """The first process's events, and those of each step of the others right after the step was scheduled."""
    main, *others = processes
    by_step: dict[int, list[Event]] = {}
    for events in others:
        for event in events:
            by_step.setdefault(event["step"], []).append(event)
    found: list[Event] = by_step.pop(0, [])
    for index, event in enumerate(main):
        found.append(event)
        following = main[index + 1]["k"] if index + 1 < len(main) else ""
        scheduled = event["k"] in ("req.scheduled", "block", "queries", "step.scheduled")
        if scheduled and following not in ("req.scheduled", "block", "queries", "step.scheduled") and _built(main, index):
            found += by_step.pop(event["step"], [])
    for step in sorted(by_step):
        found += by_step[step]
    return found


def _built(main: list[Event], index: int) -> bool:
    """Whether the step's output is complete: its requests were listed."""
    step = main[index]["step"]
    return any(e["k"] == "step.scheduled" and e["step"] == step for e in main[max(0, index - 400) : index + 1])


def _numbered(trace: list[Event]) -> list[Event]:
    """The events with `seq` from 0, and what refers to them by it."""
    at = {(e["_pid"], e["seq"]): number for number, e in enumerate(trace)}
    for number, event in enumerate(trace):
        for name in REFERENCES:
            if event.get(name) is not None:
                event[name] = at.get((event["_pid"], event[name]), event[name])
        event["seq"] = number
    for event in trace:
        del event["_pid"]
    note_unfilled(trace)
    return trace


def _cut_short(trace: list[Event]) -> Event:
    """The run.end of a run whose process ended before its engine was shut down."""
    last = trace[-1]
    return {
        "k": "run.end", "seq": last["seq"] + 1, "step": last["step"], "quiesced": False, "unfinished": [], "free_blocks": 0,
        "free_blocks_at_start": 0, "engine_requests": [], "request_objects_alive": [], "threads": 0, "crashed": True, "_pid": last["_pid"],
    }  # fmt: skip
