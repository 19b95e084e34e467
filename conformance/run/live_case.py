# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario on all of vLLM, compares it with the run without connector, and judges it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvconform.config.target import Target
from kvconform.contract.capabilities import complete
from kvconform.contract.case import Variant
from kvconform.contract.loader import Spec
from kvconform.contract.scenario import Scenario, lacking
from kvconform.errors import EnvironmentProblem, KvconformError
from kvconform.judge.verdict import Row, Verdict, judge, rows_for
from kvconform.live.baseline import Plains, plains
from kvconform.live.events import describe
from kvconform.live.job import plays
from kvconform.live.pair_run import asked
from kvconform.live.random import CLAIMS, REDUCED, claim, reduce, write
from kvconform.live.run import LiveRun, _unhurried, run_live
from kvconform.process.servers import Servers
from kvconform.report.html.story import story_of

_started = False


def capabilities(target: Target, tmp: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(capabilities, where each came from): as on the other engines, or what is declared where those cannot run the connector."""
    from kvconform.run.calibration import target_profile

    try:
        profile = target_profile(target, tmp)
        return profile.caps, profile.sources
    except KvconformError:
        raise
    except (
        Exception,
        SystemExit,
    ):  # the calibration's engine is another one: what it cannot do says nothing here
        declared = target.declared(target.resolve())
        full = complete(declared)
        return full, {name: "declared" if name in declared else "default" for name in full}


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
    plain_runs: Plains | None = None,
) -> Any:
    """As kvconform.run.case.run_and_judge, for a scenario. Writes below `tmp`, and cleans up; runs without connector are kept in `plain_runs`.

    A run in which something did not happen that was due says nothing: what would be PASS is NOT_EXERCISED.
    """
    from kvconform.run.calibration import in_its_role
    from kvconform.run.records import CaseReport

    global _started
    scenario: Scenario = variant.case  # type: ignore[assignment]
    named = None if requirements is None else set(requirements)
    wanted = [r for r in spec.requirements.values() if named is None or r.id in named]
    target = in_its_role(target)
    caps, sources = capabilities(target, tmp.parent)
    report = CaseReport(
        variant.id, variant.case.id, dict(variant.axes), [], capabilities=caps, sources=sources
    )
    unmet = scenario.unmet(caps) or lacking(scenario.faults, Servers.clearable())
    try:
        if unmet is not None:
            rows = rows_for(
                wanted, variant, Verdict.UNSUPPORTED, f"the scenario needs {unmet}", strict=strict
            )
        else:
            found, made = run_live(
                scenario,
                variant,
                target,
                spec,
                seed=seed,
                tmp=tmp,
                plain_runs=plain_runs or plains(),
            )
            if made.ended.stuck:
                raise RuntimeError(
                    f"processes of the run could not be ended: {', '.join(made.ended.stuck)}"
                )
            error = made.outcome.error
            if error is not None and error["where"] == "start":
                sentence = (
                    f"vLLM does not start with {target.connector}: {error['text'].rstrip('.')}"
                )
                if not _started:
                    raise EnvironmentProblem(sentence, made.words)
                rows = rows_for(wanted, variant, Verdict.UNSUPPORTED, sentence, strict=strict)
            else:
                _started = True
                rows = judge(
                    wanted, {"connector": found}, caps, strict=strict, disabled=set(disabled)
                )
                settle(rows, found)
                if scenario.requests and not spec.places.get(
                    f"case:{scenario.id}"
                ):  # a random one, not one of a file
                    _reduced(
                        rows, scenario, variant, target, spec, caps, tmp, plain_runs or plains()
                    )
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
    from kvconform.judge.backtrace import tell
    from kvconform.judge.describe import describe as elsewhere

    for row in rows:
        if row.verdict is Verdict.PASS and found.lacks:
            row.verdict, row.exercised, row.message = (
                Verdict.NOT_EXERCISED,
                0,
                f"the run says nothing: {'; '.join(found.lacks)}",
            )
        if row.verdict is Verdict.FAIL and row.event is not None:
            event = found.trace[row.event]
            told = describe(event)
            if (
                told is None
                and (told := elsewhere(event)) is not None
                and (story := tell(found.trace, event))
            ):
                told += f"; {story[1]}"
            row.message = f"{told} [{row.message}]" if told else row.message


def _timelines(rows: list[Row], found: LiveRun) -> dict[str, list[dict[str, Any]]]:
    from kvconform.judge.backtrace import excerpt

    return {
        row.requirement: excerpt(found.trace, row.event, row.req)
        for row in rows
        if row.verdict is Verdict.FAIL and row.event is not None
    }


def _reduced(
    rows: list[Row],
    scenario: Scenario,
    variant: Variant,
    target: Target,
    spec: Spec,
    caps: dict[str, Any],
    tmp: Path,
    plain_runs: Plains,
) -> None:
    """Make a random workload that fails smaller; the file with what is left is named in the messages of the rows, which change."""
    bad = [row for row in rows if row.verdict is Verdict.FAIL and row.gating]
    folder, claims = os.environ.get(REDUCED), os.environ.get(CLAIMS)
    if not bad or not folder:
        return
    claimed = claim(
        Path(claims) if claims else tmp / "claims",
        sorted({row.requirement for row in bad}),
        scenario.id,
    )
    for row in bad:
        if (other := claimed[row.requirement]) != scenario.id:
            row.message = f"{row.message}; {other} fails it, too, and was made small"
    names = {name for name, claimant in claimed.items() if claimant == scenario.id}
    bad = [row for row in bad if row.requirement in names]
    if not bad:
        return
    known = plain_runs.get(
        asked(scenario, 0) if scenario.pair else _unhurried(plays(scenario, None, 0))
    )
    numbers = itertools.count()

    def fails(smaller: Scenario) -> bool:
        here = tmp / f"smaller-{next(numbers)}"
        found, _ = run_live(
            smaller, variant, target, spec, seed=0, tmp=here, plain_runs=plain_runs, known=known
        )
        again = judge([spec.requirements[name] for name in names], {"connector": found}, caps)
        shutil.rmtree(here, ignore_errors=True)
        return any(row.verdict is Verdict.FAIL for row in again)

    smallest = reduce(scenario, fails)
    path = Path(folder) / f"{scenario.id}.yaml"
    write(smallest, path)
    count = len(smallest.requests)
    for row in bad:
        row.message = f"{row.message}; the same with {count} of the {len(scenario.requests)} requests: --engine live --case {path}"
