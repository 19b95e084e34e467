# SPDX-License-Identifier: Apache-2.0
"""Runs a variant with all the runs that judging it takes, and judges it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.contract.loader import Spec
from kvconform.contract.requirement import Requirement
from kvconform.engine.stand_ins import judged_alone
from kvconform.judge.backtrace import excerpt, tell
from kvconform.judge.describe import describe
from kvconform.judge.evaluate import at_stake
from kvconform.judge.relation import relate_runs
from kvconform.judge.verdict import Verdict, judge, rows_for
from kvconform.report.html.story import story_of
from kvconform.run.calibration import in_its_role, target_profile
from kvconform.run.records import CaseReport, Run
from kvconform.run.runner import run_variant

REPEATS = 3
ELSEWHERE = ("hash-seed", "second-process")  # take seconds
SAYS_NOTHING = (Verdict.NOT_EXERCISED, Verdict.UNOBSERVABLE, Verdict.UNSUPPORTED)


def run_and_judge(
    variant: Variant,
    target: Target,
    spec: Spec,
    *,
    seed: int,
    tmp: Path,
    requirements: Iterable[str] | None = None,
    strict: bool = False,
    disabled: Iterable[str] = (),
    keep_trace: bool = False,
    plain: dict[str | None, Run] | None = None,
    brief: bool = False,
) -> CaseReport:
    """Run the variant and the runs it is compared with, judge all (or the named) requirements. Writes below `tmp` and cleans up.

    `brief`: without rows of requirements that the run did not put to the test. `plain` keeps the run without connector, by kv_role, for
    other connectors on the same variant and seed.
    """
    if variant.engine == "live":
        from kvconform.run.live_case import run_and_judge as live

        how = {
            "requirements": requirements,
            "strict": strict,
            "disabled": disabled,
            "keep_trace": keep_trace,
        }
        return live(variant, target, spec, seed=seed, tmp=tmp, **how)  # type: ignore[no-any-return,arg-type]
    named = None if requirements is None else set(requirements)
    wanted = [r for r in spec.requirements.values() if named is None or r.id in named]
    target = in_its_role(target)
    profile = target_profile(target, tmp.parent)
    report = CaseReport(
        variant.id,
        variant.case.id,
        dict(variant.axes),
        [],
        capabilities=profile.caps,
        sources=profile.sources,
    )
    missing = variant.case.unmet(profile.caps)
    if missing is not None:
        rows = rows_for(
            wanted, variant, Verdict.UNSUPPORTED, f"the case needs {missing}", strict=strict
        )
        report.rows = [row.to_dict() for row in rows]
        return report
    runs: dict[str, Run] = {}
    for relation in ("connector", *variant.case.relations):
        if relation == "second-process" and target.device != "cpu":
            continue  # a forked process has no device
        if relation == "no-connector" and plain is not None and target.role in plain:
            runs[relation] = plain[target.role]
            continue
        runs[relation] = run_variant(
            variant,
            target,
            seed=seed,
            tmp=tmp / relation,
            relation=relation,
            caps=profile.caps,
            promises=profile.promises,
        )
        if relation == "no-connector" and plain is not None:
            plain[target.role] = runs[relation]
    main = runs["connector"]
    if main.lacks is not None:
        report.rows = [
            row.to_dict()
            for row in rows_for(wanted, variant, Verdict.UNSUPPORTED, main.lacks, strict=strict)
        ]
        shutil.rmtree(tmp, ignore_errors=True)
        return report
    alone = target.half == "scheduler"
    wanted = at_stake(wanted, main.trace) if brief and main.harness_error is None else wanted
    judged = [r for r in wanted if not alone or judged_alone(r.id, r.area)]
    rows = judge(judged, runs, profile.caps, strict=strict, disabled=set(disabled))
    asked = {r.id for r in judged}
    rows += rows_for(
        [r for r in wanted if r.id not in asked],
        variant,
        Verdict.UNOBSERVABLE,
        "needs the worker half",
        strict=strict,
    )
    numbers = itertools.count()

    def again(relation: str) -> Run:
        path = tmp / f"again-{next(numbers)}"
        return run_variant(
            variant,
            target,
            seed=seed,
            tmp=path,
            relation=relation,
            caps=profile.caps,
            promises=profile.promises,
        )

    for row in rows:
        req = spec.requirements[row.requirement]
        compared = (
            row.verdict == Verdict.FAIL
            and req.relate is not None
            and "no-connector" not in req.relate.runs
        )
        if compared and not differs_always(req, main, again):
            row.verdict, row.message = (
                Verdict.UNOBSERVABLE,
                "the connector does not do the same twice: it depends on timing",
            )
    for row in rows:
        told = (
            describe(main.trace[row.event])
            if row.verdict == Verdict.FAIL and row.event is not None
            else None
        )
        if told is not None and row.event is not None:
            story = tell(main.trace, main.trace[row.event])
            told += f"; {story[1]}" if story else ""
            row.message = (
                f"{told}; {row.message}"
                if spec.requirements[row.requirement].relate is not None
                else f"{told} [{row.message}]"
            )
        if (
            row.verdict == Verdict.FAIL
            and row.event is not None
            and row.requirement.startswith("hook.")
        ):
            row.evidence = evidence_of(main.trace[row.event]) or row.evidence
    report.rows = [
        row.to_dict()
        for row in rows
        if not brief or row.exercised or row.verdict not in SAYS_NOTHING
    ]
    report.unmet = main.unmet
    report.harness_error = next(
        (run.harness_error for run in runs.values() if run.harness_error), None
    )
    report.timelines = {
        row.requirement: excerpt(main.trace, row.event, row.req)
        for row in rows
        if row.verdict == Verdict.FAIL and row.event is not None
    }
    report.story = story_of(main.trace, rows)
    report.trace = main.trace if keep_trace else None
    shutil.rmtree(tmp, ignore_errors=True)
    return report


def differs_always(req: Requirement, main: Run, again: Callable[[str], Run]) -> bool:
    """Whether the runs that `req` compares differ whenever they are made, and the first of them never from itself.

    Where threads decide what comes first, one run is not like the next. `again(relation)` makes a run.
    """
    assert req.relate is not None
    second = req.relate.runs[1]
    for _ in range(1 if second in ELSEWHERE else REPEATS):
        main_again, other = again(req.relate.runs[0]), again(second)
        if _differ(req, main, main_again) or not _differ(req, main_again, other):
            return False
    return True


def _differ(req: Requirement, one: Run, other: Run) -> bool:
    assert req.relate is not None
    first, second = req.relate.runs
    traces = {str(first): one.trace, str(second): other.trace}
    monitor = relate_runs(req, traces, one.caps, one.trace[0])
    return monitor is not None and bool(monitor.violations)


def evidence_of(event: dict[str, Any]) -> str | None:
    """Where vLLM says what the hook of a `hook.returned` event is for."""
    if event["kind"] != "hook.returned":
        return None
    owner = (
        "SupportsHMA" if event["hook"] == "request_finished_all_groups" else "KVConnectorBase_V1"
    )
    return f"distributed/kv_transfer/kv_connector/v1/base.py: {owner}.{event['hook']}"
