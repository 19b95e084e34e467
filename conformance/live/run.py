# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario on all of vLLM, compares it with the run without connector, and judges it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.contract.loader import Spec
from kvconform.contract.scenario import Scenario, spared
from kvconform.live import trace as traces
from kvconform.live.baseline import Plains
from kvconform.live.engine import Made, make_run, resolved
from kvconform.live.events import _bare, missing, own_events, thin
from kvconform.live.job import Outcome, Play, plays
from kvconform.live.pair_run import run_pair
from kvconform.process.servers import Servers, clear_all

Known = tuple[Outcome, Path]
"""A run without connector, and the book of its KV."""


@dataclass
class LiveRun:
    """What judging needs of a run (kvconform.judge.verdict.RunLike)."""

    variant: Variant
    trace: list[dict[str, Any]]
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
) -> tuple[LiveRun, Made]:
    """Make the run of a scenario; its trace holds the probe's events and ours. `known`: answers of a run without connector that has all
    of its requests, if there is one. RuntimeError if vLLM fails without a connector.
    """
    if scenario.pair is not None:
        assert target is not None
        events, lacks, made, channels = run_pair(
            scenario, variant, target, seed=seed, tmp=tmp, plain_runs=plain_runs, known=known
        )
        return LiveRun(variant, events, channels, lacks=lacks), made
    wanted = plays(scenario, spec.workloads.get(scenario.workload or ""), seed)
    plain, book = known or plain_runs.get(_unhurried(wanted))
    clear_all()
    made = make_run(
        scenario.start,
        resolved(wanted, plain),
        target,
        tmp=tmp,
        model=plain_runs.model,
        book=book,
        fail=scenario.fail,
        on_failure=scenario.on_failure,
        servers=Servers.active if scenario.faults else (),
        pace=float(plain.note.get("seconds", 0.0)),
    )
    events = _trace(scenario, variant, wanted, made, plain, seed, target)
    if any(e["kind"] == "live.tokens" and not e["same"] and not e["ambiguous"] for e in events):
        # Is it the connector, or this way of starting vLLM?
        own, _ = plain_runs.get(
            _unhurried(resolved(wanted, plain)), scenario.start
        )  # the prompts that it had, answers included
        if any(
            own.answers[name].tokens != answer.tokens
            for name, answer in plain.answers.items()
            if name in own.answers
        ):
            events = _trace(scenario, variant, wanted, made, own, seed, target)
    found = LiveRun(variant, events, traces.channels(events) | {"live"})
    found.lacks = missing(scenario, made.outcome, _failed_loads(events)) + spared(
        scenario.faults, events
    )
    found.thin = thin(scenario, made.outcome, {play.name for play in wanted if play.hits})
    return found, made


def _unhurried(wanted: list[Play]) -> list[Play]:
    """The same requests, none of which is aborted, and nothing fails: the tokens that an aborted one should have had are known then."""
    return [
        play.model_copy(
            update={
                "asks": [ask.model_copy(update={"abort": None}) for ask in play.asks],
                "faults": [],
            }
        )
        for play in wanted
    ]


def _failed_loads(events: list[dict[str, Any]]) -> int:
    return sum(e["kind"] == "transfer.failed" for e in events)


def _trace(
    scenario: Scenario,
    variant: Variant,
    wanted: list[Play],
    made: Made,
    plain: Outcome,
    seed: int,
    target: Target | None,
) -> list[dict[str, Any]]:
    """The probe's trace with our events before its end."""
    connector = target.connector if target is not None else None
    start: dict[str, Any] = {
        "case": variant.case.id,
        "seed": seed,
        "connector": connector,
        "engine": "live",
    }
    how: dict[str, Any] = {"killed": made.ended.how == "timeout", "ended": made.outcome.ended}
    found = traces.collect(made.traces, **how, **start) or _bare(variant, start, made)
    hits = {play.name for play in wanted if play.hits}
    own = own_events(scenario, made.outcome, made.ended, plain.answers, _failed_loads(found), hits)
    last = found.pop() if found[-1]["kind"] == "run.end" else None
    step = found[-1]["step"]
    for event in [*own, *([last] if last else [])]:
        found.append({**event, "seq": len(found), "step": event.get("step", step)})
    return found
