# SPDX-License-Identifier: Apache-2.0
"""The run of a scenario on the complete vLLM, and the reduction of a random workload that fails."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvconform.compat.environment import is_python_only
from kvconform.config.target import Target
from kvconform.contract.capabilities import Tolerances, complete
from kvconform.contract.case import Variant
from kvconform.contract.loader import Spec
from kvconform.contract.scenario import Scenario, lacking
from kvconform.errors import EnvironmentProblem, KvconformError
from kvconform.judge.records import Row, Verdict
from kvconform.judge.verdict import judge
from kvconform.live.baseline import plains
from kvconform.live.job import plays
from kvconform.live.pair_run import asked
from kvconform.live.random import CLAIMS, REDUCED, claim, reduce, write
from kvconform.live.run import run_live, unhurried
from kvconform.process.servers import Servers
from kvconform.run.calibration import Profile, promises_of, target_profile
from kvconform.run.runs import Runs

ABOUT_KV = (
    "store",
    "persistent",
    "best_effort",
    "synthesises_kv",
    "non_prefix_reuse",
    "recomputes",
    "lossy",
    "composite",
)
"""Capabilities that describe the KV itself. Siblings do not change them."""
_started = False


def make_live_runs(variant: Variant, target: Target, spec: Spec, *, seed: int, tmp: Path) -> Runs:
    """Make the run of a scenario.

    EnvironmentProblem if vLLM is without its compiled parts, or does not start with the connector
    and never did in this process.
    """
    global _started
    if not _started and is_python_only():
        raise EnvironmentProblem(
            "engine live computes with vLLM's compiled parts, which this vLLM does not have"
            " (a pack has them if made with --capability)"
        )
    scenario = _scenario(variant)
    profile = live_profile(target, tmp.parent)
    unmet = scenario.unmet(profile.caps) or lacking(scenario.faults, Servers.clearable())
    if unmet is not None:
        return Runs(profile, refused=(Verdict.UNSUPPORTED, f"the scenario needs {unmet}"))
    try:
        found, made = run_live(
            scenario,
            variant,
            target,
            spec,
            seed=seed,
            tmp=tmp,
            plain_runs=plains(),
            tolerances=Tolerances.of(profile.caps),
        )
        if made.ended.stuck:
            stuck = ", ".join(made.ended.stuck)
            raise RuntimeError(f"processes of the run could not be ended: {stuck}")
    except RuntimeError as problem:
        sentence = str(problem).splitlines()[0]
        return Runs(profile, refused=(Verdict.ERROR, sentence), harness_error=str(problem))
    error = made.outcome.error
    if error is not None and error["where"] == "start":
        sentence = f"vLLM does not start with {target.connector}: {error['text'].rstrip('.')}"
        if not _started:
            raise EnvironmentProblem(sentence, made.words)
        return Runs(profile, refused=(Verdict.UNSUPPORTED, sentence))
    _started = True
    if scenario.start.multi:
        profile = replace(profile, caps=_with_siblings(profile.caps))
    return Runs(
        profile,
        {"connector": found},
        unmet=[*found.lacks, *found.thin],
        lacks=found.lacks,
        reduce=partial(
            reduce_failures,
            variant=variant,
            target=target,
            spec=spec,
            caps=profile.caps,
            tmp=tmp,
        ),
    )


def _with_siblings(caps: dict[str, Any]) -> dict[str, Any]:
    """Return the capabilities of a MultiConnector in which a connector has siblings.

    The hooks that are recorded are MultiConnector's. What a connector promises of its saves,
    sources and statistics, a sibling may keep otherwise.
    """
    return {**complete({}), **{name: caps[name] for name in ABOUT_KV}, "async_load": True}


def live_profile(target: Target, tmp: Path) -> Profile:
    """Return the profile of a target that the other engines determine.

    If they cannot run the connector, its capabilities are those that it declares.
    """
    try:
        return target_profile(target, tmp)
    except KvconformError:
        raise
    except (Exception, SystemExit):
        # The calibration uses another engine: its failure is no failure on this one.
        declared = target.declared(target.resolve())
        full = complete(declared)
        sources = {name: "declared" if name in declared else "default" for name in full}
        return Profile(full, sources, {}, promises_of(target, tmp, full, declared=True))


def reduce_failures(
    rows: Sequence[Row],
    *,
    variant: Variant,
    target: Target,
    spec: Spec,
    caps: dict[str, Any],
    tmp: Path,
) -> None:
    """Reduce a random workload that fails, and name its file in the rows' messages.

    Does nothing for the scenario of a file. Each requirement is reduced for one workload only, the
    first that claims it. Changes the rows; writes below `tmp`, and to the folders that the
    environment variables CLAIMS and REDUCED name.
    """
    scenario = _scenario(variant)
    bad = [row for row in rows if row.verdict is Verdict.FAIL and row.gating]
    folder = os.environ.get(REDUCED)
    claims = os.environ.get(CLAIMS)
    has_file = spec.places.get(f"case:{scenario.id}") is not None
    if not bad or not folder or not scenario.requests or has_file:
        return
    claimed = claim(
        Path(claims) if claims else tmp / "claims",
        sorted({row.requirement for row in bad}),
        scenario.id,
    )
    for row in bad:
        other = claimed[row.requirement]
        if other != scenario.id:
            row.message = f"{row.message}; {other} fails it, too, and was reduced"
    names = {name for name, claimant in claimed.items() if claimant == scenario.id}
    bad = [row for row in bad if row.requirement in names]
    if not bad:
        return
    plain_runs = plains()
    question = asked(scenario, 0) if scenario.pair else unhurried(plays(scenario, None, 0))
    known = plain_runs.get(question)
    numbers = itertools.count()

    def fails(smaller: Scenario) -> bool:
        here = tmp / f"smaller-{next(numbers)}"
        found, _ = run_live(
            smaller,
            variant,
            target,
            spec,
            seed=0,
            tmp=here,
            plain_runs=plain_runs,
            known=known,
            tolerances=Tolerances.of(caps),
        )
        again = judge([spec.requirements[name] for name in names], {"connector": found}, caps)
        shutil.rmtree(here, ignore_errors=True)
        return any(row.verdict is Verdict.FAIL for row in again)

    smallest = reduce(scenario, fails)
    path = Path(folder) / f"{scenario.id}.yaml"
    write(smallest, path)
    count = f"{len(smallest.requests)} of the {len(scenario.requests)} requests"
    for row in bad:
        row.message = f"{row.message}; the same with {count}: --engine live --case {path}"


def _scenario(variant: Variant) -> Scenario:
    """Return the scenario of a variant of engine live."""
    assert isinstance(variant.case, Scenario)
    return variant.case
