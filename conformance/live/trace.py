# SPDX-License-Identifier: Apache-2.0
"""The trace files of a live run.

Every process writes its trace to a file while it grows, so that the trace outlives the process. The
parent joins the files to one trace.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvconform.contract.events import crash, lifecycle, never_returned, run_cut_short
from kvconform.contract.trace import Event, Trace
from kvconform.judge.engine_bugs import note_unfilled


class StreamTrace(Trace):
    """A trace that writes each event to a file at once, as one line of JSON.

    An event that is amended is written again, with the same `seq`; the last line counts. Several
    threads may emit events.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._lock = threading.RLock()
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def emit(self, kind: str, /, **fields: Any) -> Event:
        """Append an event, as Trace.emit, and write it."""
        with self._lock:
            event = super().emit(kind, **fields)
            self._write(event)
            return event

    def amend(self, event: Event, **fields: Any) -> None:
        """Set fields of an event, as Trace.amend, and write it again."""
        with self._lock:
            super().amend(event, **fields)
            self._write(event)

    def _write(self, event: Event) -> None:
        """Write an event, unless the file is closed."""
        if not self._file.closed:
            self._file.write(json.dumps(event, default=str) + "\n")


CHANNELS = frozenset({"hooks", "sched", "kv", "live"})
"""The channels that a live trace may have; `channels` returns those that a trace does have.

That may include `plan`, for a connector with an Inspector. Work on a device is not recorded.
"""
UNWRITTEN = 1 << 40
"""First `seq` of the events that the parent adds for a process that was cut short."""
REFERENCES = ("called_seq",)
"""Fields that hold the `seq` of another event of the same process."""
LIFE = "life-"
"""Beginning of the name of the folder of an engine that was started again in the same run."""


def later(directory: Path, number: int) -> Path:
    """Return the folder of the traces of the `number`-th engine of a run, from 2 on.

    `directory`: that of any engine before it.
    """
    first = directory.parent if directory.name.startswith(LIFE) else directory
    return first / f"{LIFE}{number}"


def collect(
    directory: Path, *, killed: bool = False, ended: bool = False, **start: Any
) -> list[Event]:
    """Return the trace of all processes that wrote into `directory`, numbered from 0.

    Engines that were started again (`later`) continue it, each after a restart event.

    `start` replaces fields of run.start. The trace is empty if there are no events.

    Without a run.end, one of three things happened, and events say which. The engine's process
    died, in a hook if one was running. Or it was `killed` because it took too long. Or the run had
    `ended`, and vLLM killed a process of its own that did not exit.

    Events are in the order of their steps. Within a step, the scheduler's process comes first; then
    come the events of the processes that received the step, then what followed from it. A process
    that died may have left a truncated last line, which is ignored.
    """
    count = 1 + sum(1 for _ in directory.glob(f"{LIFE}*"))
    lives = [directory, *(later(directory, number) for number in range(2, count + 1))]
    found = [merged for folder in lives if (merged := _life(folder))]
    if not found:
        return []
    merged = [*found[0]]
    for number, life in enumerate(found[1:], 2):
        merged = [e for e in merged if e["kind"] != "run.end"]
        merged += _again(life, number, max(e["step"] for e in merged))
    starts = [e for e in merged if e["kind"] == "run.start"]
    ends = [e for e in merged if e["kind"] == "run.end"]
    last_end = ends[-1] if ends else None
    rest = [e for e in merged if e["kind"] not in ("run.start", "run.end") or e is last_end]
    trace = [*({**e, **start} for e in starts[:1]), *rest]
    if starts and not ends:
        trace += _cut_short(trace, killed=killed, ended=ended)
    return _numbered(trace)


def _life(directory: Path) -> list[Event]:
    """Return the events of all processes of one engine, in their order; none if there are none."""
    processes = [events for path in sorted(directory.glob("*.jsonl")) if (events := read(path))]
    if not processes:
        return []
    processes.sort(key=lambda events: not any(e["kind"] == "run.start" for e in events))
    merged = _merge(processes)
    _every_rank(merged)
    return merged


def _again(life: list[Event], number: int, steps: int) -> list[Event]:
    """Return the events of the `number`-th engine, as what follows `steps` steps of the others.

    Its start is a restart. Its transfers get names that no engine before it has used.
    """
    found = []
    for event in life:
        more = {**event, "step": event["step"] + steps, "_pid": f"{event['_pid']}.{number}"}
        if event.get("of_step") is not None:
            more["of_step"] = event["of_step"] + steps
        if more.get("transfer") is not None:
            more["transfer"] = f"{more['transfer']}.{number}"
        if event["kind"] == "run.start":
            kept = {name: more[name] for name in ("seq", "step", "_pid")}
            more = {**kept, "kind": "engine.lifecycle", **lifecycle("restart")}
        found.append(more)
    return found


def channels(trace: Iterable[Event]) -> frozenset[str]:
    """Return the channels of a trace.

    These include `kv` only if all workers could watch their KV, and `hooks` only if hooks were
    called.
    """
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
    """Return the events of one process, each with its last amendments."""
    latest: dict[int, Event] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # the process died while it wrote this line
            event["_pid"] = path.stem
            latest[event["seq"]] = event
    return [latest[seq] for seq in sorted(latest)]


def _merge(processes: list[list[Event]]) -> list[Event]:
    """Return the events of the first process, with those of the others after their step."""
    main, *others = processes
    by_step: dict[int, list[Event]] = {}
    for events in others:
        for event in events:
            by_step.setdefault(event["step"], []).append(event)
    found: list[Event] = by_step.pop(0, [])
    scheduling = ("req.scheduled", "block", "queries", "step.scheduled")
    for index, event in enumerate(main):
        found.append(event)
        following = main[index + 1]["kind"] if index + 1 < len(main) else ""
        last = event["kind"] in scheduling and following not in scheduling
        if last and _built(main, index):
            found += by_step.pop(event["step"], [])
    for step in sorted(by_step):
        found += by_step[step]
    return found


def _every_rank(events: list[Event]) -> None:
    """Set `ranks` of worker.step_end to all ranks that were bound in the step. Changes the events.

    Each rank reports only itself.
    """
    bound: dict[int, set[int]] = {}
    for event in events:
        if event["kind"] == "worker.step_end":
            bound.setdefault(event["step"], set()).update(event["ranks"])
    for event in events:
        if event["kind"] == "worker.step_end":
            event["ranks"] = sorted(bound[event["step"]])


def _built(main: list[Event], index: int) -> bool:
    """Return whether the output of the event's step is complete, so its requests are listed."""
    step = main[index]["step"]
    return any(
        e["kind"] == "step.scheduled" and e["step"] == step
        for e in main[max(0, index - 400) : index + 1]
    )


def _numbered(trace: list[Event]) -> list[Event]:
    """Return the same events, numbered from 0, with references adjusted. Changes the events."""
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
    """Return the events that a process could not write itself: how it ended."""
    last = trace[-1]
    common = {"step": last["step"], "_pid": last["_pid"]}
    found: list[Event] = []
    running = _running(trace)
    if running is not None and killed:
        said = never_returned(running, "it did not return")
        found.append({"kind": "hook.returned", **common, "_pid": running["_pid"], **said})
    # After a shutdown vLLM kills processes, which then write no run.end. That is no crash.
    crashed = running is not None or not (killed or ended)
    if crashed and not any(e["kind"] == "engine.crash" for e in trace):
        where = "hook" if killed else "process"
        error = "it did not return" if killed else "the process ended"
        hook = running["hook"] if running is not None else None
        found.append({"kind": "engine.crash", **common, **crash(where, error, hook)})
    found.append({"kind": "run.end", **common, **run_cut_short()})
    for number, event in enumerate(found):
        event["seq"] = UNWRITTEN + number
    return found


def _running(trace: list[Event]) -> Event | None:
    """Return the call of the outermost hook that has not returned, of any process."""
    returned = {(e["_pid"], e["called_seq"]) for e in trace if e["kind"] == "hook.returned"}
    called = (e for e in trace if e["kind"] == "hook.called" and e["depth"] == 0)
    return next((e for e in called if (e["_pid"], e["seq"]) not in returned), None)
