# SPDX-License-Identifier: Apache-2.0
"""Runs a variant with all the runs that judging it takes, and judges it."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvconform.backstory import tell
from kvconform.case import Variant
from kvconform.diagnosis import describe
from kvconform.evaluate import at_stake
from kvconform.excerpt import excerpt
from kvconform.html.story import story_of
from kvconform.infer import Profile, profile_of
from kvconform.load import Spec
from kvconform.relation import relate_runs
from kvconform.requirement import Requirement
from kvconform.runner import Run, run_variant
from kvconform.stub import judged_alone
from kvconform.target import Target
from kvconform.verdict import Verdict, judge, rows_for

__all__ = ["CaseReport", "Run", "run_and_judge", "run_variant"]

REPEATS = 3
ELSEWHERE = ("hash-seed", "second-process")  # take seconds
SAYS_NOTHING = (Verdict.NOT_EXERCISED, Verdict.UNOBSERVABLE, Verdict.UNSUPPORTED)
_profiles: dict[str, Profile] = {}


@dataclass
class CaseReport:
    """What one variant came to. Everything is JSON-able.

    `rows` are verdict.Row dicts, one per requirement; `unmet` are stimuli that did not happen; `timelines` maps a failed requirement to the
    events around its first violation; `trace` is the whole trace if it was asked for; `story` the run for the timeline of
    report.html (kvconform.html.story), if a requirement failed.
    """

    variant: str
    case: str
    axes: dict[str, Any]
    rows: list[dict[str, Any]]
    unmet: list[str] = field(default_factory=list)
    timelines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    harness_error: str | None = None
    capabilities: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    trace: list[dict[str, Any]] | None = None
    story: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """A plain dict."""
        return asdict(self)


def target_profile(target: Target, tmp: Path) -> Profile:
    """The capabilities and promises of a target, worked out once per process; calibration runs write below `tmp`."""
    key = repr(
        (
            target.connector,
            sorted(target.extra_config.items(), key=str),
            target.role,
            sorted(target.capabilities.items(), key=str),
            target.half,
            target.device,
            target.adapters,
        )
    )
    if key not in _profiles:
        _profiles[key] = profile_of(target, tmp / f"profile-{hashlib.sha256(key.encode()).hexdigest()[:8]}")
    return _profiles[key]


def in_its_role(target: Target) -> Target:
    """The target in a kv_role that it works with: the one that is set, else the cases', else the first one that it declares."""
    roles = list(target.declared(target.resolve()).get("roles", ())) if target.connector is not None and target.role is None else []
    return replace(target, role=roles[0]) if roles and "kv_both" not in roles else target


def run_and_judge(
    variant: Variant, target: Target, spec: Spec, *, seed: int, tmp: Path, requirements: Iterable[str] | None = None, strict: bool = False,
    disabled: Iterable[str] = (), keep_trace: bool = False, plain: dict[str | None, Run] | None = None, brief: bool = False,
) -> CaseReport:  # fmt: skip
    """Run the variant and the runs it is compared with, judge all (or the named) requirements. Writes below `tmp` and cleans up.

    `brief`: without rows of requirements that the run did not put to the test. `plain` keeps the run without connector, by kv_role, for
    other connectors on the same variant and seed.
    """
    if variant.engine == "live":
        from kvconform.live.run import run_and_judge as live

        how = {"requirements": requirements, "strict": strict, "disabled": disabled, "keep_trace": keep_trace}
        return live(variant, target, spec, seed=seed, tmp=tmp, **how)  # type: ignore[no-any-return,arg-type]
    named = None if requirements is None else set(requirements)
    wanted = [r for r in spec.requirements.values() if named is None or r.id in named]
    target = in_its_role(target)
    profile = target_profile(target, tmp.parent)
    report = CaseReport(variant.id, variant.case.id, dict(variant.axes), [], capabilities=profile.caps, sources=profile.sources)
    missing = variant.case.unmet(profile.caps)
    if missing is not None:
        rows = rows_for(wanted, variant, Verdict.UNSUPPORTED, f"the case needs {missing}", strict=strict)
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
            variant, target, seed=seed, tmp=tmp / relation, relation=relation, caps=profile.caps, promises=profile.promises
        )
        if relation == "no-connector" and plain is not None:
            plain[target.role] = runs[relation]
    main = runs["connector"]
    if main.lacks is not None:
        report.rows = [row.to_dict() for row in rows_for(wanted, variant, Verdict.UNSUPPORTED, main.lacks, strict=strict)]
        shutil.rmtree(tmp, ignore_errors=True)
        return report
    alone = target.half == "scheduler"
    wanted = at_stake(wanted, main.trace) if brief and main.harness_error is None else wanted
    judged = [r for r in wanted if not alone or judged_alone(r.id, r.area)]
    rows = judge(judged, runs, profile.caps, strict=strict, disabled=set(disabled))
    asked = {r.id for r in judged}
    rows += rows_for([r for r in wanted if r.id not in asked], variant, Verdict.UNOBSERVABLE, "needs the worker half", strict=strict)
    numbers = itertools.count()

    def again(relation: str) -> Run:
        path = tmp / f"again-{next(numbers)}"
        return run_variant(variant, target, seed=seed, tmp=path, relation=relation, caps=profile.caps, promises=profile.promises)

    for row in rows:
        req = spec.requirements[row.requirement]
        compared = row.verdict == Verdict.FAIL and req.relate is not None and "no-connector" not in req.relate.runs
        if compared and not differs_always(req, main, again):
            row.verdict, row.message = Verdict.UNOBSERVABLE, "the connector does not do the same twice: it depends on timing"
    for row in rows:
        told = describe(main.trace[row.event]) if row.verdict == Verdict.FAIL and row.event is not None else None
        if told is not None and row.event is not None:
            story = tell(main.trace, main.trace[row.event])
            told += f"; {story[1]}" if story else ""
            row.message = f"{told}; {row.message}" if spec.requirements[row.requirement].relate is not None else f"{told} [{row.message}]"
        if row.verdict == Verdict.FAIL and row.event is not None and row.requirement.startswith("hook."):
            row.evidence = evidence_of(main.trace[row.event]) or row.evidence
    report.rows = [row.to_dict() for row in rows if not brief or row.exercised or row.verdict not in SAYS_NOTHING]
    report.unmet = main.unmet
    report.harness_error = next((run.harness_error for run in runs.values() if run.harness_error), None)
    report.timelines = {
        row.requirement: excerpt(main.trace, row.event, row.req) for row in rows if row.verdict == Verdict.FAIL and row.event is not None
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
    traces = dict(zip(req.relate.runs, (one.trace, other.trace), strict=True))
    monitor = relate_runs(req, traces, one.caps, one.trace[0])
    return monitor is not None and bool(monitor.violations)


def evidence_of(event: dict[str, Any]) -> str | None:
    """Where vLLM says what the hook of a `hook.returned` event is for."""
    if event["k"] != "hook.returned":
        return None
    owner = "SupportsHMA" if event["hook"] == "request_finished_all_groups" else "KVConnectorBase_V1"
    return f"distributed/kv_transfer/kv_connector/v1/base.py: {owner}.{event['hook']}"
