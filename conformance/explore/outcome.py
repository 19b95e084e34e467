# SPDX-License-Identifier: Apache-2.0
"""The outcome of one workload: its failures, and the situations and pairs that it reached.

A pair is a requirement that was exercised with a value of an axis, or an event with the state of
its request.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvconform.config.target import Target
from kvconform.contract.loader import Spec
from kvconform.contract.requirement import Requirement
from kvconform.explore.workload import Data, Workload
from kvconform.judge.records import Row
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
    "transfer.withheld",
    "transfer.failed",
    "kv.computed",
    "sample",
}
"""Events of a request that form a pair with the request's state."""


def axes_of(data: Data) -> list[str]:
    """Return the values of a workload's axes, and the special properties of its engine."""
    found = [f"{name} {data['matrix'][name][0]}" for name in ("scheduling", "runner", "depth")]
    found += [f"engine {each}" for each in data["engines"]]
    found += [f"policy {each}" for each in data.get("policies", [])]
    config = data.get("config", {})
    special = set(config) - {"block_size", "budget", "max_seqs", "num_blocks"}
    for name in sorted(special):
        value = config[name]
        found.append(f"{name} {value}" if isinstance(value, (str, bool)) else name)
    if "block_size" in config:
        found.append(f"block_size {config['block_size']}")
    return found + [f"relation {each}" for each in data.get("relations", [])]


Pair = tuple[str, str]
"""A requirement or an event in a state, and the value of an axis."""


def pairs_of(data: Data, rows: Iterable[Row], trace: Iterable[Mapping[str, Any]]) -> list[Pair]:
    """Return the sorted pairs that a workload reached; `rows` and `trace` are those of its run."""
    axes = axes_of(data)
    found = {(row.requirement, axis) for row in rows if row.exercised for axis in axes}
    states: dict[str, str] = {}
    for event in trace:
        kind = event["kind"]
        if kind == "req.state":
            found.add((f"{event['from']} > {event['to']}, {event['by']}", axes[0]))
            states[event["req"]] = event["to"]
        elif kind in NOTED and isinstance(event.get("req"), str):
            found.add((f"{kind} in {states.get(event['req'], 'WAITING')}", axes[0]))
    return sorted(found)


def judgeable(requirements: Iterable[Requirement], caps: Mapping[str, Any]) -> set[str]:
    """Return the ids of the requirements that workloads can exercise with these capabilities.

    Without capabilities (nothing ran), all that the engines can be judged by.
    """
    return {
        req.id
        for req in requirements
        if req.kind == "requirement"
        and req.engines != ["live"]
        and (not caps or req.capability_expr.bind(caps)({}))
    }


def never(requirements: Iterable[str], reached: Iterable[Pair]) -> list[str]:
    """Return the requirements that no workload exercised, from the pairs `reached`."""
    return sorted(set(requirements) - {what for what, _ in reached})


_numbers = itertools.count()
DIED = "process.died"
"""Used as the requirement of a failure that ended the process, by a crash or a hang."""


@dataclass
class Failure:
    """A violated requirement; `found`: the kind of wrong byte, if it is about one.

    `risk`: only in a situation that no vLLM brings about.
    """

    requirement: str
    message: str
    found: str | None = None
    req: str | None = None
    step: int | None = None
    hook: str | None = None
    risk: bool = False

    @property
    def key(self) -> tuple[str, str | None, bool]:
        """Requirement, kind of wrong byte or hook, and whether it is a risk.

        Failures with the same key count as one. Shrinking keeps the key.
        """
        return self.requirement, self.found or self.hook, self.risk


@dataclass
class Outcome:
    """Outcome of one workload; `error`: what prevented a verdict.

    `unknown` are the broken guarantees that no known bug of vLLM explains; one that a known bug
    breaks counts if the mark of no such bug precedes it. `capabilities` are those of the
    connector.
    """

    failures: list[Failure] = field(default_factory=list)
    broken_guarantees: list[str] = field(default_factory=list)
    unknown: list[Failure] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    error: str | None = None
    unsupported: bool = False
    capabilities: dict[str, Any] = field(default_factory=dict)


def outcome(
    workload: Workload,
    target: Target,
    spec: Spec,
    tmp: Path,
    *,
    requirements: Iterable[str] | None = None,
    strict: bool = False,
) -> Outcome:
    """Run and judge a workload in this process.

    `requirements`: the only ones to judge, or None for all. `strict`: recommendations count. Writes
    below `tmp` and cleans up. ValidationError if the workload is not a case.
    """
    # A connector may keep state in memory by the path of its store, so each workload has its own.
    tmp = tmp / str(next(_numbers))
    report = run_and_judge(
        workload.variant(),
        target,
        spec,
        seed=workload.seed,
        tmp=tmp,
        requirements=requirements,
        strict=strict,
        brief=True,
    )
    trace = report.trace
    if report.harness_error:
        return Outcome(error=report.harness_error.strip().splitlines()[-1], reached=reached(trace))
    unclear = next((row for row in report.rows if row.verdict == "ERROR"), None)
    if unclear is not None:
        return Outcome(error=f"{unclear.requirement}: {unclear.message}", reached=reached(trace))
    failures: list[Failure] = []
    broken_guarantees: list[str] = []
    unknown: list[Failure] = []
    for row in report.rows:
        if row.verdict != "FAIL":
            continue
        if row.kind != "requirement":
            broken_guarantees.append(row.requirement)
            if not row.bugs:
                unknown.append(_failure(row, trace))
        elif row.gating or row.risk:
            failures.append(_failure(row, trace))
    return Outcome(
        failures=failures,
        broken_guarantees=broken_guarantees,
        unknown=unknown,
        reached=reached(trace),
        pairs=pairs_of(workload.data, report.rows, trace),
        unsupported=not trace,
        capabilities=report.capabilities,
    )


def _failure(row: Row, trace: list[dict[str, Any]]) -> Failure:
    number = row.event
    event = trace[number] if number is not None and number < len(trace) else {}
    found, hook = event.get("found"), event.get("hook")
    return Failure(
        row.requirement,
        row.finding,
        str(found) if found is not None else None,
        row.req,
        row.step,
        str(hook) if hook is not None else None,
        row.risk,
    )


def reached(trace: Iterable[dict[str, Any]]) -> list[str]:
    """Return the sorted names of the situations that the trace reached."""
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
