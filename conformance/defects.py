# SPDX-License-Identifier: Apache-2.0
"""Known-bad connectors: does the suite find each of them, by the requirements that name it and by no others?

`spec/defects.yaml` lists them. `python -m kvconform.defects` prints which requirement catches which, and fails when that is not as listed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from kvconform.case import Engine, Variant
from kvconform.errors import UsageError
from kvconform.load import Spec, load_spec
from kvconform.requirement import Id, Model

FAILED = ("FAIL", "ERROR", "XPASS")


class Defect(Model):
    """One known-bad connector. Run on `cases`, it must fail exactly the requirements `fails`; those in `may` can fail too."""

    id: Id
    text: str = Field(min_length=1, description="what is wrong with it, in one line")
    connector: str
    extra_config: dict[str, Any] = {}
    capabilities: dict[str, Any] = {}
    bugs: list[Annotated[str, Field(pattern=r"^B\d{3}$")]] = Field(default=[], description="real bugs of this kind")
    engines: list[Engine] = Field(default=["reference"], min_length=1)
    hook_timeout: float = Field(default=10.0, description="seconds that a hook may take")
    cases: list[Id] = Field(min_length=1)
    fails: list[Id] = Field(min_length=1)
    may: list[Id] = []


@dataclass
class Outcome:
    """What became of one defect. `failed` maps requirements to the variants that failed them; `problem` is empty if all is as listed."""

    defect: str
    failed: dict[str, list[str]] = field(default_factory=dict)
    problem: str = ""


def load_defects(spec: Spec) -> dict[str, Defect]:
    """The registry. UsageError for an entry that is not a defect or names a case or requirement that does not exist."""
    found = {}
    for name, raw in spec.defects.items():
        where = spec.places.get(f"defect:{name}", name)
        try:
            defect = found[name] = Defect(**raw)
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        unknown = [case for case in defect.cases if case not in spec.cases]
        unknown += [requirement for requirement in (*defect.fails, *defect.may) if requirement not in spec.requirements]
        if unknown:
            raise UsageError(f"{where}: defect {name} names {unknown[0]}, which does not exist")
    return found


def variants(defect: Defect, spec: Spec) -> Iterator[Variant]:
    """All runs of the defect's cases on its engines."""
    for case in defect.cases:
        yield from spec.cases[case].variants(defect.engines)


def examine(defect: Defect, spec: Spec, tmp: Path) -> Outcome:
    """Run one defect on its cases. Writes below `tmp` only."""
    from kvconform import watchdog
    from kvconform.run import run_and_judge
    from kvconform.target import Target

    # What the connector sets out to do is what the reference connector does: a defect must not talk its way out of a requirement.
    sound = {"store": True, "saves": "all", "chunk_tokens": 4, "async_load": defect.extra_config.get("load") == "async"}
    options = {"store": "{tmp}/store", **defect.extra_config}
    target = Target(defect.connector, options, capabilities={**sound, **defect.capabilities}, hook_timeout=defect.hook_timeout)
    outcome = Outcome(defect.id)
    watchdog.start(defect.hook_timeout)
    try:
        for number, variant in enumerate(variants(defect, spec)):
            report = run_and_judge(variant, target, spec, seed=0, tmp=tmp / str(number))
            if report.harness_error:
                outcome.problem = f"the harness broke on {variant.id}: {report.harness_error.splitlines()[-1]}"
                return outcome
            for row in report.rows:
                if row["verdict"] in FAILED:
                    outcome.failed.setdefault(row["requirement"], []).append(variant.id)
    finally:
        watchdog.stop()
    outcome.problem = difference(defect, set(outcome.failed))
    return outcome


def difference(defect: Defect, failed: set[str]) -> str:
    """How the failed requirements differ from those listed; empty if they do not."""
    missed, extra = sorted(set(defect.fails) - failed), sorted(failed - set(defect.fails) - set(defect.may))
    parts = [f"not caught by {', '.join(missed)}"] * bool(missed) + [f"also fails {', '.join(extra)}"] * bool(extra)
    return "; ".join(parts)


@cache
def _spec() -> Spec:
    return load_spec()


def examine_named(name: str) -> Outcome:
    """`examine` for a worker process, which reads the specification once."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    spec = _spec()
    with tempfile.TemporaryDirectory(prefix="kvconform-") as tmp:
        return examine(load_defects(spec)[name], spec, Path(tmp))


def run_defects(names: list[str], jobs: int) -> list[Outcome]:
    """Examine the named defects (none: all) in `jobs` processes; in the order of the registry."""
    known = load_defects(_spec())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"unknown defect {unknown[0]!r}; known are {', '.join(known)}")
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return list(pool.map(examine_named, names or list(known)))


def print_table(outcomes: list[Outcome]) -> None:
    """defect | bug | caught by | also failed, and what is not as listed."""
    from rich.console import Console
    from rich.table import Table

    known, table = load_defects(_spec()), Table("defect", "bug", "caught by", "also failed")
    for column in table.columns:
        column.overflow = "fold"  # an id cut short is of no use to anybody
    for outcome in outcomes:
        defect = known[outcome.defect]
        caught = [name for name in defect.fails if name in outcome.failed]
        also = [name for name in outcome.failed if name not in defect.fails]
        table.add_row(defect.id, " ".join(defect.bugs), "\n".join(caught), "\n".join(also), style="red" if outcome.problem else None)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for outcome in outcomes:
        if outcome.problem:
            console.print(f"{outcome.defect}: {outcome.problem}", style="red", markup=False)
    console.print(f"{sum(not outcome.problem for outcome in outcomes)} of {len(outcomes)} defects are caught as listed")


def main(names: list[str] | None = None) -> int:
    """The command: 0 if every defect is caught exactly as listed, 1 if not, 2 for a name that does not exist."""
    try:
        outcomes = run_defects(sys.argv[1:] if names is None else names, jobs=min(4, len(os.sched_getaffinity(0))))
    except UsageError as error:
        print(error.message, file=sys.stderr)
        return error.code
    print_table(outcomes)
    return int(any(outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
