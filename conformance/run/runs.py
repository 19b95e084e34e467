# SPDX-License-Identifier: Apache-2.0
"""The runs that judging a variant takes, on the engines that are driven step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvconform.config.target import Target
from kvconform.contract.capabilities import CAPABILITIES, common, complete
from kvconform.contract.case import Variant
from kvconform.errors import UsageError
from kvconform.judge.foreign import ForeignKV, foreign, sentence
from kvconform.judge.records import Row, Verdict
from kvconform.judge.verdict import RunLike
from kvconform.run.calibration import Profile, target_profile
from kvconform.run.isolation import process_restart
from kvconform.run.records import Run
from kvconform.run.runner import run_variant

PlainRuns = dict[str | None, Run]
"""Baseline runs, by kv_role."""


@dataclass
class Runs:
    """The runs of one variant, and what judging them needs.

    `runs` maps relations to runs; the one called `connector` is judged. If there are none,
    `refused` is the verdict and the message of every row. `unmet` are stimuli that did not happen.
    `lacks` are events that did not happen, without which the run is inconclusive. `again(relation)`
    repeats a run. `reduce` reduces a workload that failed, and adds to the messages of the rows.
    `judged_by`: the capabilities that hold in this run, if not all of the profile's do.
    """

    profile: Profile
    runs: Mapping[str, RunLike] = field(default_factory=dict)
    refused: tuple[Verdict, str] | None = None
    unmet: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    harness_error: str | None = None
    again: Callable[[str], Run] | None = None
    reduce: Callable[[Sequence[Row]], None] | None = None
    judged_by: dict[str, Any] | None = None

    @property
    def caps(self) -> dict[str, Any]:
        """The capabilities by which the runs are judged."""
        return self.profile.caps if self.judged_by is None else self.judged_by


def caps_of(variant: Variant, target: Target, profile: Profile) -> dict[str, Any]:
    """Return the capabilities that hold in a run: with other options, a connector may promise less.

    UsageError if what it declares for these options is no declaration.
    """
    if not variant.case.changes_settings:
        return profile.caps
    after = target.restarted()
    try:
        declared = after.declared(after.resolve())
        complete(declared)
    except UsageError as error:
        raise UsageError(f"[extra_config_after_restart]: {error}") from error
    return common(profile.caps, declared)


def unsupported(variant: Variant, target: Target, caps: dict[str, Any]) -> str | None:
    """Return in words what a case needs and the connector or its settings lack, or None."""
    missing = variant.case.unmet(caps)
    if missing is not None:
        alone = CAPABILITIES.get(missing.strip("()"))
        return f"the case needs {missing}" + ("" if alone is None else f": {alone.doc}")
    if variant.case.changes_settings and not target.extra_config_after_restart:
        return (
            "the connector's settings declare no [extra_config_after_restart]: options with which"
            " it may come back over the same store"
        )
    return None


def make_runs(
    variant: Variant,
    target: Target,
    *,
    seed: int,
    tmp: Path,
    plain: PlainRuns | None = None,
    rests: bool = False,
) -> Runs:
    """Make the run of a variant and the runs that it is compared with, below `tmp`.

    What the connector's calibration found is kept next to `tmp`, for later runs.

    `plain` caches baseline runs of the same variant and seed; new ones are added to it.

    A run that loaded KV of other runs is repeated in a fresh interpreter, because the memory of
    this process may have held it. ForeignKV if such KV comes back there, too: the store holds it.

    With `rests`, connectors get time to store before stored content is asked for.
    """
    profile = target_profile(target, tmp.parent)
    caps = caps_of(variant, target, profile)
    missing = unsupported(variant, target, caps)
    if missing is not None:
        return Runs(profile, refused=(Verdict.UNSUPPORTED, missing))

    # Threads of an earlier run may hold locks, which a fork would keep for ever.
    restarts = rests and process_restart(variant.case.steps) is not None

    def run(relation: str, folder: str, *, afresh: bool = restarts) -> Run:
        made = run_variant(
            variant,
            target,
            seed=seed,
            tmp=tmp / folder,
            relation=relation,
            caps=caps,
            promises=profile.promises,
            afresh=afresh,
            rests=rests,
        )
        event = foreign(made.trace)
        if event is None:
            return made
        if afresh or relation == "hash-seed":  # that run has an interpreter of its own
            raise ForeignKV(sentence(event, target.extra_config))
        return run(relation, f"{folder}-afresh", afresh=True)

    runs: dict[str, Run] = {}
    for relation in ("connector", *variant.case.relations):
        if relation == "second-process" and target.device != "cpu":
            continue  # a forked process has no device
        if relation == "hash-seed" and target.hash_seed is not None:
            continue  # every interpreter has the same one
        if relation != "no-connector" or plain is None:
            runs[relation] = run(relation, relation)
            continue
        if target.role not in plain:
            plain[target.role] = run(relation, relation)
        runs[relation] = plain[target.role]
    main = runs["connector"]
    if main.lacks is not None:
        return Runs(profile, refused=(Verdict.UNSUPPORTED, main.lacks))
    numbers = itertools.count()
    errors = (each.harness_error for each in runs.values() if each.harness_error)
    return Runs(
        profile,
        runs,
        judged_by=caps,
        unmet=main.unmet,
        harness_error=next(errors, None),
        again=lambda relation: run(relation, f"again-{next(numbers)}"),
    )
