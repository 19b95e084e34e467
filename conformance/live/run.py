# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario on all of vLLM, compares it with the run without connector, and judges it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvconform.capabilities import complete
from kvconform.case import Variant
from kvconform.errors import EnvironmentProblem, KvconformError
from kvconform.html.story import story_of
from kvconform.live import trace as traces
from kvconform.live.compare import describe
from kvconform.live.engine import Made, make_run, resolved
from kvconform.live.events import missing, own_events, thin
from kvconform.live.fault import lacking, spared
from kvconform.live.job import Outcome, Play
from kvconform.live.pair_run import asked, run_pair
from kvconform.live.plains import Plains, plains
from kvconform.live.reduce import CLAIMS, REDUCED, claim, reduce, write
from kvconform.live.scenario import Scenario
from kvconform.live.workload import plays
from kvconform.load import Spec
from kvconform.servers import Servers, clear_all
from kvconform.target import Target
from kvconform.verdict import Row, Verdict, judge, rows_for

_started = False
Known = tuple[Outcome, Path]
"""A run without connector, and the book of its KV."""


@dataclass
class LiveRun:
    """What judging needs of a run (kvconform.verdict.RunLike)."""

    variant: Variant
    trace: list[dict[str, Any]]
    channels: frozenset[str]
    harness_error: str | None = None
    lacks: list[str] = field(default_factory=list)
    thin: list[str] = field(default_factory=list)


def capabilities(target: Target, tmp: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(capabilities, where each came from): as on the other engines, or what is declared where those cannot run the connector."""
    from kvconform.run import target_profile

    try:
        profile = target_profile(target, tmp)
        return profile.caps, profile.sources
    except KvconformError:
        raise
    except (Exception, SystemExit):  # the calibration's engine is another one: what it cannot do says nothing here
        declared = target.declared(target.resolve())
        full = complete(declared)
        return full, {name: "declared" if name in declared else "default" for name in full}


def run_live(
    scenario: Scenario, variant: Variant, target: Target | None, spec: Spec, *, seed: int, tmp: Path, plain_runs: Plains,
    known: Known | None = None,
) -> tuple[LiveRun, Made]:  # fmt: skip
    """Make the run of a scenario; its trace holds the probe's events and ours. `known`: answers of a run without connector that has all
    of its requests, if there is one. RuntimeError if vLLM fails without a connector."""
    if scenario.pair is not None:
        assert target is not None
        events, lacks, made, channels = run_pair(scenario, variant, target, seed=seed, tmp=tmp, plain_runs=plain_runs, known=known)
        return LiveRun(variant, events, channels, lacks=lacks), made
    wanted = plays(scenario, spec.workloads.get(scenario.workload or ""), seed)
    plain, book = known or plain_runs.get(_unhurried(wanted))
    clear_all()
    made = make_run(
        scenario.start, resolved(wanted, plain), target, tmp=tmp, model=plain_runs.model, book=book, fail=scenario.fail,
        on_failure=scenario.on_failure, servers=Servers.active if scenario.faults else (),
        pace=float(plain.note.get("seconds", 0.0)),
    )  # fmt: skip
    events = _trace(scenario, variant, wanted, made, plain, seed, target)
    if any(e["k"] == "live.tokens" and not e["same"] and not e["ambiguous"] for e in events):
        # Is it the connector, or this way of starting vLLM?
        own, _ = plain_runs.get(_unhurried(resolved(wanted, plain)), scenario.start)  # the prompts that it had, answers included
        if any(own.answers[name].tokens != answer.tokens for name, answer in plain.answers.items() if name in own.answers):
            events = _trace(scenario, variant, wanted, made, own, seed, target)
    found = LiveRun(variant, events, traces.channels(events) | {"live"})
    found.lacks = missing(scenario, made.outcome, _failed_loads(events)) + spared(scenario.faults, events)
    found.thin = thin(scenario, made.outcome, {play.name for play in wanted if play.hits})
    return found, made


def _unhurried(wanted: list[Play]) -> list[Play]:
    """The same requests, none of which is aborted, and nothing fails: the tokens that an aborted one should have had are known then."""
    return [
        play.model_copy(update={"asks": [ask.model_copy(update={"abort": None}) for ask in play.asks], "faults": []}) for play in wanted
    ]


def _failed_loads(events: list[dict[str, Any]]) -> int:
    return sum(e["k"] == "transfer.failed" for e in events)


def _trace(
    scenario: Scenario, variant: Variant, wanted: list[Play], made: Made, plain: Outcome, seed: int, target: Target | None
) -> list[dict[str, Any]]:
    """The probe's trace with our events before its end."""
    connector = target.connector if target is not None else None
    start: dict[str, Any] = {"case": variant.case.id, "seed": seed, "connector": connector, "engine": "live"}
    how: dict[str, Any] = {"killed": made.ended.how == "timeout", "ended": made.outcome.ended}
    found = traces.collect(made.traces, **how, **start) or _bare(variant, start, made)
    hits = {play.name for play in wanted if play.hits}
    own = own_events(scenario, made.outcome, made.ended, plain.answers, _failed_loads(found), hits)
    last = found.pop() if found[-1]["k"] == "run.end" else None
    step = found[-1]["step"]
    for event in [*own, *([last] if last else [])]:
        found.append({**event, "seq": len(found), "step": event.get("step", step)})
    return found


def _bare(variant: Variant, start: dict[str, Any], made: Made) -> list[dict[str, Any]]:
    """A trace of a run that the probe saw nothing of."""
    from kvconform.environment import check_vllm

    first = {
        "k": "run.start", "seq": 0, "step": 0, **start, "scheduling": variant.scheduling, "runner": variant.runner, "depth": variant.depth,
        "vllm": check_vllm()[0], "block_size": variant.block_size, "num_blocks": variant.case.start.blocks, "policies": [],  # type: ignore[attr-defined]
        "spec_tokens": variant.case.start.spec_tokens, "role": "kv_both", "failure_policy": "recompute", "groups": 1, "ranks": 1,  # type: ignore[attr-defined]
        "stages": 1, "context_ranks": 1, "device": "cpu", "slow": None,
    }  # fmt: skip
    return [first]


def run_and_judge(
    variant: Variant, target: Target, spec: Spec, *, seed: int, tmp: Path, requirements: Iterable[str] | None = None, strict: bool = False,
    disabled: Iterable[str] = (), keep_trace: bool = False, plain_runs: Plains | None = None,
) -> Any:  # fmt: skip
    """As kvconform.run.run_and_judge, for a scenario. Writes below `tmp`, and cleans up; runs without connector are kept in `plain_runs`.

    A run in which something did not happen that was due says nothing: what would be PASS is NOT_EXERCISED.
    """
    from kvconform.run import CaseReport, in_its_role

    global _started
    scenario: Scenario = variant.case  # type: ignore[assignment]
    named = None if requirements is None else set(requirements)
    wanted = [r for r in spec.requirements.values() if named is None or r.id in named]
    target = in_its_role(target)
    caps, sources = capabilities(target, tmp.parent)
    report = CaseReport(variant.id, variant.case.id, dict(variant.axes), [], capabilities=caps, sources=sources)
    unmet = scenario.unmet(caps) or lacking(scenario.faults, Servers.clearable())
    try:
        if unmet is not None:
            rows = rows_for(wanted, variant, Verdict.UNSUPPORTED, f"the scenario needs {unmet}", strict=strict)
        else:
            found, made = run_live(scenario, variant, target, spec, seed=seed, tmp=tmp, plain_runs=plain_runs or plains())
            if made.ended.stuck:
                raise RuntimeError(f"processes of the run could not be ended: {', '.join(made.ended.stuck)}")
            error = made.outcome.error
            if error is not None and error["where"] == "start":
                sentence = f"vLLM does not start with {target.connector}: {error['text'].rstrip('.')}"
                if not _started:
                    raise EnvironmentProblem(sentence, made.words)
                rows = rows_for(wanted, variant, Verdict.UNSUPPORTED, sentence, strict=strict)
            else:
                _started = True
                rows = judge(wanted, {"connector": found}, caps, strict=strict, disabled=set(disabled))
                settle(rows, found)
                if scenario.requests and not spec.places.get(f"case:{scenario.id}"):  # a random one, not one of a file
                    _reduced(rows, scenario, variant, target, spec, caps, tmp, plain_runs or plains())
                report.unmet = [*found.lacks, *found.thin]
                report.timelines = _timelines(rows, found)
                report.story = story_of(found.trace, rows)
                report.trace = found.trace if keep_trace else None
    except RuntimeError as problem:
        rows = rows_for(wanted, variant, Verdict.ERROR, str(problem).splitlines()[0], strict=strict)
        report.harness_error = str(problem)
    report.rows = [row.to_dict() for row in rows]
    shutil.rmtree(tmp, ignore_errors=True)
    return report


def settle(rows: list[Row], found: LiveRun) -> None:
    """Fill in what our events say in words; turn PASS into NOT_EXERCISED where something due did not happen. Changes the rows."""
    from kvconform.backstory import tell
    from kvconform.diagnosis import describe as elsewhere

    for row in rows:
        if row.verdict is Verdict.PASS and found.lacks:
            row.verdict, row.exercised, row.message = Verdict.NOT_EXERCISED, 0, f"the run says nothing: {'; '.join(found.lacks)}"
        if row.verdict is Verdict.FAIL and row.event is not None:
            event = found.trace[row.event]
            told = describe(event)
            if told is None and (told := elsewhere(event)) is not None and (story := tell(found.trace, event)):
                told += f"; {story[1]}"
            row.message = f"{told} [{row.message}]" if told else row.message


def _timelines(rows: list[Row], found: LiveRun) -> dict[str, list[dict[str, Any]]]:
    from kvconform.excerpt import excerpt

    return {
        row.requirement: excerpt(found.trace, row.event, row.req) for row in rows if row.verdict is Verdict.FAIL and row.event is not None
    }


def _reduced(
    rows: list[Row], scenario: Scenario, variant: Variant, target: Target, spec: Spec, caps: dict[str, Any], tmp: Path, plain_runs: Plains
) -> None:
    """Make a random workload that fails smaller; the file with what is left is named in the messages of the rows, which change."""
    bad = [row for row in rows if row.verdict is Verdict.FAIL and row.gating]
    folder, claims = os.environ.get(REDUCED), os.environ.get(CLAIMS)
    if not bad or not folder:
        return
    claimed = claim(Path(claims) if claims else tmp / "claims", sorted({row.requirement for row in bad}), scenario.id)
    for row in bad:
        if (other := claimed[row.requirement]) != scenario.id:
            row.message = f"{row.message}; {other} fails it, too, and was made small"
    names = {name for name, claimant in claimed.items() if claimant == scenario.id}
    bad = [row for row in bad if row.requirement in names]
    if not bad:
        return
    known = plain_runs.get(asked(scenario, 0) if scenario.pair else _unhurried(plays(scenario, None, 0)))
    numbers = itertools.count()

    def fails(smaller: Scenario) -> bool:
        here = tmp / f"smaller-{next(numbers)}"
        found, _ = run_live(smaller, variant, target, spec, seed=0, tmp=here, plain_runs=plain_runs, known=known)
        again = judge([spec.requirements[name] for name in names], {"connector": found}, caps)
        shutil.rmtree(here, ignore_errors=True)
        return any(row.verdict is Verdict.FAIL for row in again)

    smallest = reduce(scenario, fails)
    path = Path(folder) / f"{scenario.id}.yaml"
    write(smallest, path)
    count = len(smallest.requests)
    for row in bad:
        row.message = f"{row.message}; the same with {count} of the {len(scenario.requests)} requests: --engine live --case {path}"
