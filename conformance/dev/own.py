# SPDX-License-Identifier: Apache-2.0
"""A defect of one's own: a fault of the engine or a connector, by its name `package.module:NAME`.

`kvconform defects package.module:NAME -k CASE` runs it like a planted defect, without an entry in
spec/defects.yaml, and says what finds it.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from kvconform.compat.installed import check_vllm
from kvconform.config.selection import select
from kvconform.config.settings import Settings
from kvconform.contract.loader import Spec
from kvconform.dev.defect import Defect, Outcome
from kvconform.dev.defects import examine, specification
from kvconform.errors import UsageError
from kvconform.execute.answers import Death
from kvconform.execute.choice import LOCAL, Choice, executor
from kvconform.execute.work import Calls
from kvconform.files import scratch_root
from kvconform.refimpl.faulty import Fault
from kvconform.words import many

AT_ONCE = 8
"""Cases of a piece of work. It depends on nothing, so that the report does not either."""
TROUBLE = ("the harness", "ended the process")
"""Beginnings of problems that are no difference between what fails and what was listed."""


def cases_of(spec: Spec, selected: Sequence[str]) -> list[str]:
    """Return the ids of the selected cases that run on engine `reference`; all without any.

    UsageError for an entry that selects nothing.
    """
    vllm, _ = check_vllm()
    found = select(spec, Settings(engine="reference", select=list(selected)), vllm)
    return list(dict.fromkeys(variant.case.id for variant in found.variants))


def defect_of(symbol: str, cases: Sequence[str]) -> Defect:
    """Return the defect that a name stands for, on these cases. Imports it.

    UsageError if it does not exist, or is neither a Fault nor a connector's class.
    """
    try:
        found = resolve_name(symbol)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{symbol} cannot be imported: {error}") from None
    if isinstance(found, Fault):
        return Defect.model_construct(
            id=symbol, engine_fault=symbol, cases=list(cases), fails=[], may=[]
        )
    if inspect.isclass(found) and hasattr(found, "build_connector_meta"):
        return Defect.model_construct(
            id=symbol, connector=symbol, cases=list(cases), fails=[], may=[]
        )
    kind = "Fault (kvconform.refimpl.faulty)"
    raise UsageError(f"{symbol} is neither a {kind} nor a connector's class")


@dataclass(frozen=True)
class Part:
    """A piece of work: a defect on some cases."""

    symbol: str
    cases: tuple[str, ...]


def examine_own(part: Part) -> Outcome:
    """Run a defect on cases, in a worker. UsageError if it does not exist or changes nothing."""
    symbol = part.symbol
    defect = defect_of(symbol, part.cases)
    spec = specification()
    try:
        with tempfile.TemporaryDirectory(prefix="kvconform-", dir=scratch_root()) as tmp:
            return examine(defect, spec, Path(tmp), watched=spec.requirements)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{symbol} changes what does not exist: {error}") from None


def joined(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the outcome of all runs of the outcomes of some of them."""
    whole: dict[str, Any] = {"failed": {}, "found": {}, "passed_by": {}, "problem": ""}
    name = ""
    for each in outcomes:
        name = each.defect
        for requirement, runs in each.failed.items():
            whole["failed"].setdefault(requirement, []).extend(runs)
            whole["found"].setdefault(requirement, each.found[requirement])
        for requirement, verdicts in each.passed_by.items():
            whole["passed_by"].setdefault(requirement, {}).update(verdicts)
        if each.problem.startswith(TROUBLE):
            whole["problem"] = each.problem
    return Outcome(defect=name, **whole)


def report(outcome: Outcome, cases: int) -> list[str]:
    """Return what found it, or that nothing did, as lines."""
    held = [name for name, verdicts in outcome.passed_by.items() if "PASS" in verdicts]
    held = [name for name in held if name not in outcome.failed]
    others = f"{many(len(held), 'other requirement')} exercised in {many(cases, 'case')}, and held"
    if outcome.problem:
        return [f"{outcome.defect}: {outcome.problem}"]
    if not outcome.failed:
        return [f"{outcome.defect}: nothing finds it; {others.replace('other ', '')}"]
    lines = [f"{outcome.defect}: found by {many(len(outcome.failed), 'requirement')}; {others}"]
    for name, runs in outcome.failed.items():
        lines.append(f"  {name}: {many(len(runs), 'run')}, first {runs[0]}")
        lines.append(f"    {outcome.found[name]}")
    return lines


def main(
    symbols: Sequence[str], selected: Sequence[str], *, jobs: int | None, where: Choice = LOCAL
) -> int:
    """Examine each, print what finds it, and return 1 if one is not found, else 0.

    UsageError for what does not exist. `selected`: cases, areas or globs; none: all cases.
    """
    cases = cases_of(specification(), selected)
    parts = [tuple(cases[first : first + AT_ONCE]) for first in range(0, len(cases), AT_ONCE)]
    missed = False
    work = Calls(examine_own, folders=(os.getcwd(),))
    with executor(where, work, "defects", jobs) as workers:
        pieces = [Part(symbol, part) for symbol in symbols for part in parts]
        done = workers.run(pieces)
        for symbol in symbols:
            outcome = joined(_outcome(symbol, found) for _, found in islice(done, len(parts)))
            print(*report(outcome, len(cases)), sep="\n", flush=True)
            missed = missed or not outcome.failed or bool(outcome.problem)
    return int(missed)


def _outcome(symbol: str, found: Outcome | Death) -> Outcome:
    if isinstance(found, Death):
        return Outcome(defect=symbol, problem=f"ended the process {found}")
    return found
