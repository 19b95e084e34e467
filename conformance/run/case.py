# SPDX-License-Identifier: Apache-2.0
"""One variant, run and judged.

The four steps are the same for every engine: make the runs, judge them, drop differences that are
not deterministic, and word what is left.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvconform.config.target import Target
from kvconform.contract.case import Variant
from kvconform.contract.loader import Spec
from kvconform.contract.requirement import Requirement
from kvconform.engine.stand_ins import judged_alone
from kvconform.judge.evaluate import at_stake
from kvconform.judge.known import name_known_bugs
from kvconform.judge.narrate import excerpts, narrate
from kvconform.judge.records import CaseReport, Row, Verdict
from kvconform.judge.relation import relate_runs
from kvconform.judge.verdict import RunLike, judge, rows_for, unreached
from kvconform.run.calibration import in_its_role
from kvconform.run.records import Run
from kvconform.run.runs import PlainRuns, Runs, make_runs

REPEATS = 3
"""How often a comparison that failed is repeated."""
ELSEWHERE = ("hash-seed", "second-process")
"""Relations whose runs take seconds; their comparison is repeated once."""
PROMISES = ("profile.expectation", "profile.repaired")
"""Events about what should have come back, which a store in the background may still have had."""
SAYS_NOTHING = (Verdict.NOT_EXERCISED, Verdict.UNOBSERVABLE, Verdict.UNSUPPORTED)
"""Verdicts that a brief report leaves out."""


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
    plain: PlainRuns | None = None,
    brief: bool = False,
) -> CaseReport:
    """Run a variant and the runs that it is compared with, and judge them.

    Judges the named requirements, or all. Writes below `tmp`, which it removes, and next to it.
    `brief` leaves out the rows of requirements that the run did not exercise. `plain` caches the
    baseline runs, for other connectors on the same variant and seed. ForeignKV if the store holds
    KV of other runs.
    """
    wanted = list(spec.requirements.values())
    if requirements is not None:
        named = set(requirements)
        wanted = [each for each in wanted if each.id in named]
    target = in_its_role(target)
    again = tmp.with_name(f"{tmp.name}-unhurried")
    try:
        if variant.engine == "live":
            # Imported on demand: the other engines do not start vLLM.
            from kvconform.run.live_runs import make_live_runs

            made = make_live_runs(variant, target, spec, seed=seed, tmp=tmp)
        else:
            made = make_runs(variant, target, seed=seed, tmp=tmp, plain=plain)
            if _was_too_fast(made, spec):
                made = make_runs(variant, target, seed=seed, tmp=again, plain=plain, rests=True)
        report = CaseReport(
            variant.id,
            capabilities=made.profile.caps,
            sources=made.profile.sources,
            doubts=made.profile.doubts,
            harness_error=made.harness_error,
        )
        if made.refused is not None:
            report.rows = rows_for(wanted, variant, *made.refused, strict=strict)
            return report
        main = made.runs["connector"]
        if brief and main.harness_error is None:
            wanted = at_stake(wanted, main.trace)
        rows = judge_runs(made, wanted, variant, target, strict=strict, disabled=set(disabled))
        if report.harness_error is None and (crash := unjudged_crash(made, spec)) is not None:
            report.harness_error = crash
            report.trace = list(main.trace)
            report.rows = rows_for(wanted, variant, Verdict.ERROR, crash, strict=strict)
            return report
        drop_flaky(rows, made, spec.requirements)
        say_unreached(rows, made.unmet, variant, spec.requirements)
        narrate(rows, main.trace, spec.requirements)
        name_known_bugs(rows, main.trace)
        if made.reduce is not None:
            made.reduce(rows)
        report.rows = [
            row for row in rows if not brief or row.exercised or row.verdict not in SAYS_NOTHING
        ]
        report.unmet = made.unmet
        report.works_aside = isinstance(main, Run) and main.works_aside
        report.trace = list(main.trace)
        report.excerpts = excerpts(rows, main.trace)
        return report
    finally:
        for folder in (tmp, again):
            shutil.rmtree(folder, ignore_errors=True)


def _was_too_fast(made: Runs, spec: Spec) -> bool:
    """Return whether all that failed is that too little came back, and it may still be on its way.

    A connector that stores in the background, or when it is polled, is asked too early if the steps
    follow each other without a pause. In a run that fails otherwise, the hurry may be what shows
    it. A situation that did not come about counts if threads or processes may have been storing,
    and so does a soak after which less came back.
    """
    main = made.runs.get("connector")
    if not isinstance(main, Run) or made.harness_error is not None:
        return False
    promised = (event for event in main.trace if event["kind"] in PROMISES)
    unmet = bool(main.hurried and main.unmet)
    served = any(e["kind"] == "soak.served" and e["last"] < e["first"] for e in main.trace)
    missing = any(each["reloadable"] < each["promised"] for each in promised)
    if not (unmet or missing or (main.hurried and served)):
        return False  # nothing is missing: most runs are not judged twice
    rows = judge(list(spec.requirements.values()), made.runs, made.caps)
    failed = [row for row in rows if row.verdict is Verdict.FAIL]
    late = (*PROMISES, "soak.served")
    short = [row for row in failed if spec.requirements[row.requirement].event in late]
    return bool(short or unmet) and not any(row.gating for row in failed if row not in short)


def unjudged_crash(made: Runs, spec: Spec) -> str | None:
    """Return the error that ended a run if it breaks no requirement: nothing was judged then."""
    trace = made.runs["connector"].trace
    crash = next((e for e in trace if e["kind"] == "engine.crash"), None)
    if crash is None:
        return None
    rows = judge(list(spec.requirements.values()), made.runs, made.caps)
    broken = (Verdict.FAIL, Verdict.ERROR, Verdict.BLOCKED)
    if any(row.verdict in broken for row in rows):
        return None
    return f"the run ended without a verdict: {crash['error']} ({crash['error_at']})"


def judge_runs(
    made: Runs,
    wanted: Sequence[Requirement],
    variant: Variant,
    target: Target,
    *,
    strict: bool,
    disabled: set[str],
) -> list[Row]:
    """Judge the runs.

    Requirements that need a half of the connector that is absent are UNOBSERVABLE. In an
    inconclusive run (`made.lacks`), PASS becomes NOT_EXERCISED.
    """
    alone = target.half == "scheduler" and variant.engine != "live"
    judged = [each for each in wanted if not alone or judged_alone(each.id, each.area)]
    rows = judge(judged, made.runs, made.caps, strict=strict, disabled=disabled)
    for row in rows if made.lacks else ():
        if row.verdict is Verdict.PASS:
            row.verdict = Verdict.NOT_EXERCISED
            row.exercised = 0
            row.message = f"the run is inconclusive: {'; '.join(made.lacks)}"
    judged_ids = {each.id for each in judged}
    rest = [each for each in wanted if each.id not in judged_ids]
    rows += rows_for(rest, variant, Verdict.UNOBSERVABLE, "needs the worker half", strict=strict)
    return rows


def say_unreached(
    rows: Sequence[Row],
    unmet: Sequence[str],
    variant: Variant,
    requirements: Mapping[str, Requirement],
) -> None:
    """Say why requirements were not exercised that the case is about. Changes the rows."""
    for row in rows:
        if unmet and unreached(row, variant, requirements[row.requirement]):
            row.message = f"the case did not reach its situation: {unmet[0]}"


def drop_flaky(rows: Sequence[Row], made: Runs, requirements: Mapping[str, Requirement]) -> None:
    """Withdraw the failures of comparisons whose runs do not always differ. Changes the rows.

    Comparisons with a baseline run are not repeated, because a run without a connector is
    deterministic.
    """
    main = made.runs["connector"]
    for row in rows:
        req = requirements[row.requirement]
        if (
            row.verdict is Verdict.FAIL
            and req.relate is not None
            and "no-connector" not in req.relate.runs
            and made.again is not None
            and not differs_always(req, main, made.again)
        ):
            row.verdict = Verdict.UNOBSERVABLE
            row.check = None
            row.message = "the connector is not deterministic: it depends on timing"


def differs_always(req: Requirement, main: RunLike, again: Callable[[str], Run]) -> bool:
    """Return whether the two runs that `req` compares differ every time.

    The first of them must not differ from its own repetition: threads may decide the order of
    events. `again(relation)` repeats a run.
    """
    assert req.relate is not None
    second = req.relate.runs[1]
    for _ in range(1 if second in ELSEWHERE else REPEATS):
        main_again = again(req.relate.runs[0])
        other = again(second)
        if _differ(req, main, main_again) or not _differ(req, main_again, other):
            return False
    return True


def _differ(req: Requirement, one: Any, other: Run) -> bool:
    assert req.relate is not None
    first, second = req.relate.runs
    traces = {str(first): one.trace, str(second): other.trace}
    monitor = relate_runs(req, traces, one.caps, one.trace[0])
    return monitor is not None and bool(monitor.violations)
