# SPDX-License-Identifier: Apache-2.0
"""What a workload has reached: pairs of a requirement that was put to the test and a value of an axis, and pairs of an event and the state
that its request was in.

What a workload came to: what failed, and what was reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvconform.config.target import Target
from kvconform.contract.loader import Spec
from kvconform.explore.workload import Data, Workload
from kvconform.run.case import run_and_judge

NOTED = {
    "lookup",
    "alloc",
    "load.due",
    "hold",
    "release",
    "req.finished",
    "req.scheduled",
    "req.updated",
    "transfer.reported",
    "transfer.failed",
    "kv.computed",
    "sample",
}
"""Events of one request that are worth knowing in which of its states they came."""


def axes_of(data: Data) -> list[str]:
    """The values of the axes of a workload, and what else is special about its engine."""
    found = [f"{name} {data['matrix'][name][0]}" for name in ("scheduling", "runner", "depth")]
    found += [f"engine {each}" for each in data["engines"]] + [
        f"policy {each}" for each in data.get("policies", [])
    ]
    config = data.get("config", {})
    special = set(config) - {"block_size", "budget", "max_seqs", "num_blocks"}
    found += [
        f"{name} {config[name]}" if isinstance(config[name], (str, bool)) else name
        for name in sorted(special)
    ]
    found += [f"block_size {config[name]}" for name in ("block_size",) if name in config]
    return found + [f"beside {each}" for each in data.get("relations", [])]


def pairs_of(
    data: Data, rows: Iterable[Mapping[str, Any]], trace: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Sorted. Rows and trace are those of its run."""
    axes = axes_of(data)
    found = {
        f"{row['requirement']} | {axis}" for row in rows if row.get("exercised") for axis in axes
    }
    states: dict[str, str] = {}
    for event in trace:
        kind = event["kind"]
        if kind == "req.state":
            found.add(f"{event['from']} > {event['to']}, {event['by']} | {axes[0]}")
            states[event["req"]] = event["to"]
        elif kind in NOTED and isinstance(event.get("req"), str):
            found.add(f"{kind} in {states.get(event['req'], 'WAITING')} | {axes[0]}")
    return sorted(found)


def never(requirements: Iterable[str], reached: Iterable[str]) -> list[str]:
    """Those of the requirements that no workload has put to the test: situations that nobody draws."""
    seen = {pair.partition(" | ")[0] for pair in reached}
    return sorted(set(requirements) - seen)


_numbers = itertools.count()
DIED = "process.died"
"""Stands for a requirement where the process ended: the connector took it down, or hung."""


@dataclass
class Failure:
    """A requirement that was broken: what is said of it, and the kind of wrong byte, if it is one."""

    requirement: str
    message: str
    found: str | None = None
    req: str | None = None
    step: int | None = None
    hook: str | None = None

    @property
    def key(self) -> tuple[str, str | None]:
        """Two failures with the same key are taken for one, and shrinking keeps the key: requirement, and kind of wrong byte or hook."""
        return self.requirement, self.found or self.hook


@dataclass
class Outcome:
    """JSON-able by `to_dict`."""

    failures: list[Failure] = field(default_factory=list)
    broken_guarantees: list[str] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)
    error: str | None = None
    unsupported: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Outcome:
        return cls(**{**data, "failures": [Failure(**each) for each in data["failures"]]})


def outcome(
    workload: Workload,
    target: Target,
    spec: Spec,
    tmp: Path,
    *,
    requirements: Iterable[str] | None = None,
    strict: bool = False,
) -> Outcome:
    """Run and judge a workload in this process; recommendations count if `strict`. Writes below `tmp` and cleans up. ValidationError if it
    is no case."""
    tmp = tmp / str(
        next(_numbers)
    )  # what a connector keeps in memory by the place of its store is not the next workload's
    report = run_and_judge(
        workload.variant(),
        target,
        spec,
        seed=workload.seed,
        tmp=tmp,
        requirements=requirements,
        keep_trace=True,
        strict=strict,
        brief=True,
    )
    trace = report.trace or []
    if report.harness_error:
        return Outcome(error=report.harness_error.strip().splitlines()[-1], reached=reached(trace))
    unclear = next((row for row in report.rows if row["verdict"] == "ERROR"), None)
    if unclear is not None:
        return Outcome(
            error=f"{unclear['requirement']}: {unclear.get('message')}", reached=reached(trace)
        )
    bad = [row for row in report.rows if row["verdict"] == "FAIL"]
    ours = [
        row
        for row in bad
        if row.get("kind", "requirement") == "requirement" and row.get("gating", True)
    ]
    return Outcome(
        failures=[_failure(row, trace) for row in ours],
        broken_guarantees=[
            row["requirement"] for row in bad if row.get("kind", "requirement") != "requirement"
        ],
        reached=reached(trace),
        pairs=pairs_of(workload.data, report.rows, trace),
        unsupported=not trace,
    )


def _failure(row: dict[str, Any], trace: list[dict[str, Any]]) -> Failure:
    number = row.get("event")
    event = trace[number] if number is not None and number < len(trace) else {}
    found, hook = event.get("found"), event.get("hook")
    return Failure(
        row["requirement"],
        row.get("message") or "",
        str(found) if found is not None else None,
        row.get("req"),
        row.get("step"),
        str(hook) if hook is not None else None,
    )


def reached(trace: Iterable[dict[str, Any]]) -> list[str]:
    """Which of the situations that make a workload worth running came about, sorted."""
    found: set[str] = set()
    loading: set[str] = set()
    waited_for: set[str] = set()
    for event in trace:
        kind = event["kind"]
        if kind == "lookup" and (event["tokens"] or 0) > 0:
            found.add("hit")
        elif kind == "load.due":
            found.add("load")
            loading.discard(event["req"])
        elif kind == "alloc" and event["external"] > 0:
            loading.add(event["req"])
        elif kind == "req.state" and event["to"] == "PREEMPTED":
            found.add("preemption")
        elif kind == "kv.computed" and event["rejected"]:
            found.add("rejected draft")
        elif kind == "req.state" and event["to"] == "FINISHED_ABORTED":
            found.add("abort")
            if event["req"] in loading:
                found.add("abort during a load")
            if event["in_flight"] or event["req"] in loading | waited_for:
                found.add("abort in flight")
        elif kind == "request.new" and event["generation"] > 0:
            found.add("id taken again")
        elif kind == "hold":
            found.add("blocks held")
            waited_for.add(event["req"])
        elif kind == "release":
            waited_for.discard(event["req"])
    return sorted(found)
