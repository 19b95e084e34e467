# SPDX-License-Identifier: Apache-2.0
"""A trace that is written to a file while it grows, so that it outlives its process.

Joins what the processes of one live run wrote into one trace.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvconform.contract.events import run_cut_short
from kvconform.contract.trace import Event, Trace
from kvconform.judge.engine_bugs import note_unfilled


class StreamTrace(Trace):
    """Appends events, and writes each as a line at once. A line with a `seq` that the file has already is the event as it came to be.

    Events of other threads than the one that made the trace are taken, too.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._lock = threading.RLock()
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def emit(self, kind: str, /, **fields: Any) -> Event:
        with self._lock:
            event = super().emit(kind, **fields)
            self._write(event)
            return event

    def amend(self, event: Event, **fields: Any) -> None:
        """As Trace.amend; writes the event again."""
        with self._lock:
            super().amend(event, **fields)
            self._write(event)

    def _write(self, event: Event) -> None:
        if not self._file.closed:
            self._file.write(json.dumps(event, default=str) + "\n")


CHANNELS = frozenset({"hooks", "sched", "kv", "live"})
"""The channels that a live trace may have; `channels` says which it has (also `plan`, if the connector has an Inspector). Nobody tells what
happens on a device."""
UNWRITTEN = 1 << 40
"""From here on events are numbered, within their process, that it could not write itself."""
REFERENCES = ("called_seq",)
"""Fields that hold the `seq` of another event of the same process."""


def collect(
    directory: Path, *, killed: bool = False, ended: bool = False, **start: Any
) -> list[Event]:
    """The trace of all processes that wrote into `directory`, numbered from 0. `start` replaces fields of run.start.

    Without a run.end the engine's process died, of a hook if one was running; or it was `killed`, because it took too long; or the run had
    `ended`, and vLLM put an end to a process of its own that did not end by itself.

    Events are in the order of their steps, as carried from process to process; within a step the scheduler's process comes first, then
    what the others did when they were given the step, then what was made of it. Empty if nobody wrote anything. Half a line at the end of
    a file is what a process was writing when it died.
    """
    processes = [events for path in sorted(directory.glob("*.jsonl")) if (events := read(path))]
    if not processes:
        return []
    processes.sort(key=lambda events: not any(e["kind"] == "run.start" for e in events))
    merged = _merge(processes)
    _every_rank(merged)
    starts = [e for e in merged if e["kind"] == "run.start"]
    ends = [e for e in merged if e["kind"] == "run.end"]
    rest = [
        e
        for e in merged
        if e["kind"] not in ("run.start", "run.end") or e is (ends[-1] if ends else None)
    ]
    trace = [*({**e, **start} for e in starts[:1]), *rest]
    if starts and not ends:
        trace += _cut_short(trace, killed=killed, ended=ended)
    return _numbered(trace)


def channels(trace: Iterable[Event]) -> frozenset[str]:
    """The channels that a trace has: `kv` only where the workers could look at the KV, and with a connector `hooks`."""
    events = list(trace)
    looked = [e for e in events if e["kind"] == "live.kv"]
    found = {"sched", "live"}
    if any(e["kind"] == "hook.called" for e in events):
        found.add("hooks")
    if looked and all(e["watched"] and e["compared"] and e["poisoned"] for e in looked):
        found.add("kv")
    if any(e["kind"] == "plan" for e in events):
        found.add("plan")
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
        following = main[index + 1]["kind"] if index + 1 < len(main) else ""
        scheduled = event["kind"] in ("req.scheduled", "block", "queries", "step.scheduled")
        if (
            scheduled
            and following not in ("req.scheduled", "block", "queries", "step.scheduled")
            and _built(main, index)
        ):
            found += by_step.pop(event["step"], [])
    for step in sorted(by_step):
        found += by_step[step]
    return found


def _every_rank(events: list[Event]) -> None:
    """Each of several ranks knows of itself that it was bound in a step; put together, it is what worker.step_end says. Changes these."""
    bound: dict[int, set[int]] = {}
    for event in events:
        if event["kind"] == "worker.step_end":
            bound.setdefault(event["step"], set()).update(event["ranks"])
    for event in events:
        if event["kind"] == "worker.step_end":
            event["ranks"] = sorted(bound[event["step"]])


def _built(main: list[Event], index: int) -> bool:
    """Whether the step's output is complete: its requests were listed."""
    step = main[index]["step"]
    return any(
        e["kind"] == "step.scheduled" and e["step"] == step
        for e in main[max(0, index - 400) : index + 1]
    )


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
    note_unfilled(Trace.of(trace))
    return trace


def _cut_short(trace: list[Event], *, killed: bool, ended: bool) -> list[Event]:
    """What a process could not write any more: how it came to its end."""
    last = trace[-1]
    common = {"step": last["step"], "_pid": last["_pid"]}
    found: list[Event] = []
    running = _running(trace)
    if running is not None and killed:
        fields = {name: running[name] for name in ("hook", "half", "rank", "depth")}
        found.append(
            {
                "kind": "hook.returned",
                **common,
                "_pid": running["_pid"],
                **fields,
                "error": "HookTimeout",
                "error_text": "it did not return",
                "value": None,
                "value_ok": True,
                "mutated_args": False,
                "params_msgpack_ok": True,
                "params_aliased": False,
                "called_seq": running["seq"],
                "layer": None,
                "timed_out": True,
            }
        )
    gone = running is not None or not (
        killed or ended
    )  # one that was shut down is ended by vLLM, and need not say so
    if not any(e["kind"] == "engine.crash" for e in trace) and gone:
        where = "hook" if killed else "process"
        error = "it did not return" if killed else "the process ended"
        found.append(
            {
                "kind": "engine.crash",
                **common,
                "where": where,
                "error": error,
                "hook": running and running["hook"],
            }
        )
    found.append({"kind": "run.end", **common, **run_cut_short()})
    for number, event in enumerate(found):
        event["seq"] = UNWRITTEN + number
    return found


def _running(trace: list[Event]) -> Event | None:
    """The outermost hook that has not returned, in whatever process."""
    returned = {(e["_pid"], e["called_seq"]) for e in trace if e["kind"] == "hook.returned"}
    called = (e for e in trace if e["kind"] == "hook.called" and e["depth"] == 0)
    return next((e for e in called if (e["_pid"], e["seq"]) not in returned), None)
