# SPDX-License-Identifier: Apache-2.0
"""Failures grouped by cause, and the command that reproduces one."""

from __future__ import annotations

import importlib.machinery
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvconform.config.settings import Settings
from kvconform.contract.situation import situations
from kvconform.judge.circumstances import possible
from kvconform.judge.foreign import CAUSE
from kvconform.judge.records import FAILED_LOAD, Row
from kvconform.report.collector import Collector
from kvconform.report.stage import AT_THE_END, Stage, is_unheard, stage

SHOWN = 4
"""Number of causes of one requirement that are shown separately. Further causes join the last."""
CONFIRMED = "save.confirmed"
"""The requirement on saves that come too early; for KV that was never there, also too late."""
PROCESS_RULE = "A connector MUST NOT end the process that it runs in."
"""The rule of a failure about a dead process whose requirement the specification does not have."""

NO_VLLM = "the contract allows and vLLM does not bring about"
"""Words for the runs of a risk."""


_Cause = tuple[str, bool, tuple[str, ...]]
"""A requirement, whether the failure counts, and its cause."""


def by_cause(rows: Sequence[Row]) -> list[list[Row]]:
    """Return failed rows grouped by requirement and cause; at most SHOWN groups of each kind.

    The first row of a group says what kind of failure it is: of two requests whose KV was mixed up,
    it is one that fewest differences tell apart. It is the easiest of those to read (`plainest`). A
    risk whose cause also fails where it counts joins that group, behind the rows that count. The
    requirements are ordered as `_earlier_first` has it, causes before what they may explain
    (kvconform.report.stage); the causes of one requirement by first appearance.
    """
    groups: dict[_Cause, list[Row]] = {}
    home: dict[_Cause, list[Row]] = {}
    shown: dict[tuple[str, bool], list[list[Row]]] = {}
    for row in sorted(rows, key=lambda row: (not row.gating, len(row.differs))):
        key = (row.requirement, row.gating, row.cause)
        if row.risk and (row.requirement, True, row.cause) in home:
            key = (row.requirement, True, row.cause)
        if key not in home:
            known = shown.setdefault(key[:2], [])
            if len(known) < SHOWN:
                groups[key] = []
                known.append(groups[key])
            home[key] = known[-1]
        home[key].append(row)
    for group in groups.values():
        group.insert(0, group.pop(group.index(plainest(group))))
    ordered = _earlier_first(dict.fromkeys(row.requirement for row in rows), rows)
    position = {requirement: index for index, requirement in enumerate(ordered)}
    return [group for key, group in sorted(groups.items(), key=lambda item: position[item[0][0]])]


def plainest(group: Sequence[Row]) -> Row:
    """Return the row that is the easiest to read, of those that are like the first of a group.

    These count as the first does, have the same cause, and ran with the same engine and scheduling.
    A row that says whether the save or the load went wrong is preferred, then the earliest in its
    run.
    """

    def kind(row: Row) -> tuple[object, ...]:
        risk = row.gating, row.risk, len(row.differs)
        return *risk, row.cause, row.engine, row.scheduling, row.runner, row.depth, row.slow

    alike = [row for row in group if kind(row) == kind(group[0])]
    return min(alike, key=lambda row: (row.side is None, row.event is None, row.event or 0))


def other_runs(group: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the further runs of a group: those of the kind of its first row, and the risks."""
    first = group[0]
    rest = [row for row in group[1:] if row.run != first.run]
    alike = dict.fromkeys(row.run for row in rest if row.risk == first.risk)
    risks = dict.fromkeys(row.run for row in rest if row.risk and not first.risk)
    return list(alike), [run for run in risks if run not in alike]


def _earlier_first(requirements: Iterable[str], rows: Sequence[Row]) -> list[str]:
    """Return the requirements by stage; within a stage, a requirement precedes those it preceded.

    Requirement A precedes B if A failed earlier than B in a run in which both failed. Otherwise the
    given order is kept.
    """
    when: dict[str, dict[str, int]] = {}
    for row in rows:
        if row.event is not None:
            when.setdefault(row.requirement, {}).setdefault(row.run, row.event)

    def earlier(one: str, other: str) -> bool:
        first = when.get(one, {})
        second = when.get(other, {})
        common = min(first.keys() & second.keys(), default=None)
        return common is not None and first[common] < second[common]

    stages: dict[str, Stage] = {}
    for row in rows:
        stages.setdefault(row.requirement, stage(row))
    order: list[str] = []
    for name in requirements:
        preceded = (
            index
            for index, other in enumerate(order)
            if stages[other] == stages[name] and earlier(name, other)
        )
        order.insert(next(preceded, len(order)), name)
    return sorted(order, key=stages.__getitem__)


def headline(row: Row) -> str:
    """Return in one clause what was found, and the line that raised; the message has all of it."""
    found = row.headline or (row.message or "it failed").partition("; ")[0].rstrip(".")
    return found if row.place is None or row.headline is None else f"{found} ({row.place})"


def caveat(row: Row) -> str:
    """Return what a failure is if it is no violation of a MUST by the connector; else nothing."""
    if row.requirement in AT_THE_END:
        return "no requirement names the cause: the engine's or the connector's fault"
    if row.kind == "guarantee":
        return "the engine's, not the connector's fault"
    if row.risk:
        return "risk: this vLLM does not bring it about; it counts with --strict"
    return "" if row.gating else "recommended only; it counts with --strict"


def usual_causes(row: Row, wrong: str) -> str:
    """Return those of a requirement's usual causes (`wrong`) that the failure leaves possible.

    There are none if an outdated table explains what was found, or a save is known to have come too
    late, or upon a failed load. A hit that nothing in the run explains has causes of its own. What
    a hook did wrong by itself has causes of this hook and, if it raised, of the kind of its error.
    """
    if is_unheard(row):
        return CAUSE
    hook = row.hook if row.requirement.startswith("hook.") else None
    late = row.requirement == CONFIRMED and row.side == "save"
    told = row.outdated is not None or late or FAILED_LOAD in row.cause
    return "" if told else possible(wrong, row.absent, hook, row.cause if hook else ())


def beyond(row: Row) -> list[str]:
    """Return a sentence per situation of the row's run that no vLLM brings about."""
    known = [situations()[name] for name in row.beyond if name in situations()]
    return [
        f"{each.id}, which the contract allows and vLLM does not do: {each.why}"
        f" ({each.source.file}: {each.source.symbol})"
        for each in known
    ]


THROUGH = "KVCONFORM_THROUGH"
"""Environment variable: a command that passes its arguments on to `kvconform run`.

nox sets it, because it runs kvconform in an environment of its own.
"""


def reproduction(collector: Collector, row: Row) -> str:
    """Return the command that runs the row's run again."""
    return shlex.join(reproduction_words(collector, row))


def reproduction_words(collector: Collector, row: Row) -> list[str]:
    """Return the words of the command that runs the row's run again."""
    alike = collector.spec.cases[row.case].variants(
        [row.engine], [row.scheduling], [row.slow] if row.slow else None
    )
    return command(collector.settings, row, alone=len(alike) == 1 and row.slow is None)


def command(settings: Settings, row: Row, *, alone: bool) -> list[str]:
    """Return the words of the `kvconform run` command (or of that in THROUGH) for the row's run.

    `alone`: the case has only one run with this engine and scheduling, so the case's id selects it.
    """
    parts = run_of(settings)
    if str(Path.cwd()) not in settings.pythonpath and lies_here(settings.connector):
        parts += ["--pythonpath", "."]
    if alone:
        parts += ["-k", row.case, "--engine", row.engine, "--scheduling", row.scheduling]
    else:
        parts += ["-k", row.run]
    parts += ["--seed", str(settings.seed), *settings.arguments]
    return parts


def lies_here(connector: str) -> bool:
    """Return whether a connector is found only because its package is in the working directory.

    `python -m kvconform` looks there, and the command `kvconform` does not.
    """
    package, colon, _ = connector.partition(":")
    here = Path.cwd().resolve()
    if not colon or str(here) in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        return False
    top = here / package.partition(".")[0]
    if not (top.is_dir() or top.with_suffix(".py").is_file()):
        return False
    found = importlib.machinery.PathFinder.find_spec(top.name, [str(here)])
    elsewhere = [path for path in sys.path if path and Path(path).resolve() != here]
    return (
        found is not None and importlib.machinery.PathFinder.find_spec(top.name, elsewhere) is None
    )


def run_of(settings: Settings) -> list[str]:
    """Return the words `kvconform run CONNECTOR`, or those of the command in THROUGH."""
    name = settings.catalogue or settings.connector
    through = os.environ.get(THROUGH)
    return [*shlex.split(through), "--connector", name] if through else ["kvconform", "run", name]
