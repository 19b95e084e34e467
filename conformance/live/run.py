# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario with the complete vLLM, and compares it with its baseline run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvconform.config.target import Target, inside
from kvconform.contract.capabilities import EXACT, Tolerances
from kvconform.contract.case import Variant
from kvconform.contract.events import altered_in_entry
from kvconform.contract.loader import Spec
from kvconform.contract.scenario import Scenario, spared
from kvconform.contract.trace import Event
from kvconform.live import trace as traces
from kvconform.live.baseline import Plains, plain_start
from kvconform.live.engine import Made, make_run, resolved
from kvconform.live.events import bare, missing, own_events, thin
from kvconform.live.job import Outcome, Play, plays
from kvconform.live.pair_run import run_pair
from kvconform.process.servers import Servers, clear_all

Known = tuple[Outcome, Path]
"""A baseline run, and the file of its KV (the book)."""


@dataclass
class LiveRun:
    """A run as kvconform.judge.verdict judges it (RunLike there).

    `lacks`: messages about what was due and did not happen. `thin`: messages about phases in which
    nothing was loaded.
    """

    variant: Variant
    trace: list[Event]
    channels: frozenset[str]
    harness_error: str | None = None
    lacks: list[str] = field(default_factory=list)
    thin: list[str] = field(default_factory=list)


def run_live(
    scenario: Scenario,
    variant: Variant,
    target: Target | None,
    spec: Spec,
    *,
    seed: int,
    tmp: Path,
    plain_runs: Plains,
    known: Known | None = None,
    tolerances: Tolerances = EXACT,
) -> tuple[LiveRun, Made]:
    """Run a scenario, below `tmp`; its trace has the probe's events and those of this process.

    `known`: a baseline run that contains all its requests, and its book, if there is one.
    `tolerances`: how far loaded KV may be off. Raises RuntimeError if vLLM fails without a
    connector.
    """
    if scenario.pair is not None:
        assert target is not None
        events, lacks, made, channels = run_pair(
            scenario,
            variant,
            target,
            seed=seed,
            tmp=tmp,
            plain_runs=plain_runs,
            known=known,
            tolerances=tolerances,
        )
        return LiveRun(variant, events, channels, lacks=lacks), made
    wanted = plays(scenario, spec.workloads.get(scenario.workload or ""), seed)
    plain, book = known or plain_runs.get(unhurried(wanted), plain_start(scenario.start))
    clear_all()
    if target is not None and scenario.start.multi:
        target = inside(target, scenario.start.multi)
    made = make_run(
        scenario.start,
        resolved(wanted, plain),
        target,
        tmp=tmp,
        model=plain_runs.model(wanted, scenario.start),
        drafter=plain_runs.drafter(scenario.start),
        book=book,
        fail=scenario.fail,
        on_failure=scenario.on_failure,
        servers=Servers.active if scenario.faults else (),
        pace=float(plain.note.get("seconds", 0.0)),
        tolerances=tolerances,
    )
    events = _trace(scenario, variant, wanted, made, plain, seed, target)
    if any(e["kind"] == "live.tokens" and not e["same"] and not e["ambiguous"] for e in events):
        # The reason may be this way of starting vLLM, and not the connector. So make a baseline run
        # that is started in this way, with the prompts that this run had.
        own, _ = plain_runs.get(unhurried(resolved(wanted, plain)), scenario.start)
        start_matters = any(
            own.answers[name].tokens != answer.tokens
            for name, answer in plain.answers.items()
            if name in own.answers
        )
        if start_matters:
            events = _trace(scenario, variant, wanted, made, own, seed, target)
    found = LiveRun(variant, events, traces.channels(events) | {"live"})
    found.lacks = [
        *missing(scenario, made.outcome, _failed_loads(events)),
        *spared(scenario.faults, events),
    ]
    found.thin = thin(scenario, made.outcome, {play.name for play in wanted if play.hits})
    return found, made


def unhurried(wanted: list[Play]) -> list[Play]:
    """Return the same requests for a baseline run: no abort, fault, restart or interruption.

    So the tokens are known that an aborted request should have got.
    """
    return [
        play.model_copy(
            update={
                "asks": [ask.model_copy(update={"abort": None}) for ask in play.asks],
                "faults": [],
                "restart": False,
                "interrupt": None,
                "reset": play.reset or play.restart,
            }
        )
        for play in wanted
    ]


def _failed_loads(events: list[Event]) -> int:
    """Return the number of failed loads."""
    return sum(e["kind"] == "transfer.failed" for e in events)


def _trace(
    scenario: Scenario,
    variant: Variant,
    wanted: list[Play],
    made: Made,
    plain: Outcome,
    seed: int,
    target: Target | None,
) -> list[Event]:
    """Return the probe's trace, with the events of this process before its end."""
    start: dict[str, Any] = {
        "case": variant.case.id,
        "seed": seed,
        "connector": target.connector if target is not None else None,
        "engine": "live",
    }
    how: dict[str, Any] = {"killed": made.ended.how == "timeout", "ended": made.outcome.ended}
    found = traces.collect(made.traces, **how, **start) or bare(variant, start, made)
    hits = {play.name for play in wanted if play.hits}
    altered = {e["sent"] for e in found if e["kind"] == "live.entered" and altered_in_entry(e)}
    own = own_events(
        scenario, made.outcome, made.ended, plain.answers, _failed_loads(found), hits, altered
    )
    last = found.pop() if found[-1]["kind"] == "run.end" else None
    step = found[-1]["step"]
    for event in [*own, *([last] if last else [])]:
        found.append({**event, "seq": len(found), "step": event.get("step", step)})
    return found
