# SPDX-License-Identifier: Apache-2.0
"""The verdicts on the terminal: a line per area, or (with -v) a table per area."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from kvconform.contract.requirement import Requirement
from kvconform.judge.aggregate import Aggregate
from kvconform.judge.records import Row, Verdict
from kvconform.report.collector import Collector
from kvconform.report.layout import paragraph
from kvconform.words import many

STYLE = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.ERROR: "bold magenta",
    Verdict.XFAIL: "yellow",
    Verdict.XPASS: "bold red",
    Verdict.BLOCKED: "red",
    Verdict.DISABLED: "yellow",
}
COUNTED = {
    Verdict.ERROR,
    Verdict.NOT_EXERCISED,
    Verdict.UNSUPPORTED,
    Verdict.UNOBSERVABLE,
    Verdict.DISABLED,
}
"""Statuses that the tables only count. Errors have a section of their own."""
SILENT = (
    "the requirements of these areas did not come up or do not apply here;"
    " what cases of the same name judge counts in other areas"
)
"""What it means that an area has no verdict: most cases about preemption judge loads and saves."""
COLUMNS: tuple[tuple[str, JustifyMethod], ...] = (
    ("requirement", "left"),
    ("level", "left"),
    ("verdict", "left"),
    ("exercised in", "right"),
)


def print_lines(console: Console, collector: Collector, found: Aggregate) -> None:
    """Print a line per area with a verdict, and the names of the others."""
    console.print()
    held = 0
    broken: list[str] = []
    silent: list[str] = []
    for area, names in sorted(_areas(collector, found).items()):
        known = collector.spec.requirements
        guarantees = {name for name in names if name in known and known[name].kind == "guarantee"}
        held += sum(found.status[name] is Verdict.PASS for name in guarantees)
        broken += [name for name in guarantees if found.status[name] is Verdict.XFAIL]
        counts = Counter(found.status[name] for name in names if name not in guarantees)
        if not counts:
            continue
        if not set(counts) - COUNTED:
            silent.append(area)
            continue
        parts = [f"{counts.pop(Verdict.PASS)} pass"] if counts[Verdict.PASS] else []
        parts += _not_counting(names, found)
        counts[Verdict.FAIL] = 0  # here, no failure counts
        parts += [f"{count} {verdict_name(name)}" for name, count in counts.most_common() if count]
        console.print(f"{area:<13} {', '.join(parts)}", soft_wrap=True)
    parts = [f"{many(held, 'guarantee')} held"] if held else []
    if broken:
        parts.append(f"{', '.join(sorted(broken))} broken, as is known")
    if parts:
        paragraph(console, "the engine", ", ".join(parts), indent=14)
    if silent:
        text = f"{', '.join(silent)}: {SILENT}"
        paragraph(console, "no verdict", text, indent=14)


def _not_counting(names: Sequence[str], found: Aggregate) -> list[str]:
    """Return how many of these requirements fail as a risk, and as a recommendation, in words."""
    risks = sum(name in found.risks for name in names)
    advice = sum(name in found.advisory and name not in found.risks for name in names)
    counts = ((risks, "risk"), (advice, "recommendation"))
    return [many(count, word) for count, word in counts if count]


def _areas(collector: Collector, found: Aggregate) -> dict[str, list[str]]:
    """Return the requirements of each area."""
    areas: dict[str, list[str]] = {}
    for name in found.status:
        requirement = collector.spec.requirements.get(name)
        area = requirement.area if requirement else name.partition(".")[0]
        areas.setdefault(area, []).append(name)
    return areas


def print_tables(
    console: Console, collector: Collector, rows: Sequence[Row], found: Aggregate
) -> None:
    """Print a table per area: each requirement with its status.

    Statuses in COUNTED, and guarantees that hold, are only counted below the table, unless a run
    about the requirement did not reach its situation.
    """
    exercised: dict[str, int] = {}
    failing: dict[str, int] = {}
    for row in rows:
        exercised[row.requirement] = exercised.get(row.requirement, 0) + (row.exercised > 0)
        failing[row.requirement] = failing.get(row.requirement, 0) + (
            row.verdict in (Verdict.FAIL, Verdict.XFAIL)
        )
    areas = _areas(collector, found)
    for area in sorted(areas):
        table = Table(
            box=SIMPLE,
            title=area,
            title_justify="left",
            title_style="bold",
            pad_edge=False,
            show_edge=False,
        )
        for column, justify in COLUMNS:
            table.add_column(column, justify=justify, no_wrap=True)
        silent: Counter[str] = Counter()
        held = 0
        for name in sorted(areas[area]):
            status = found.status[name]
            requirement = collector.spec.requirements.get(name)
            guarantee = requirement is not None and requirement.kind == "guarantee"
            unreached = len(found.unreached.get(name, ()))
            if guarantee and status is Verdict.PASS and not unreached:
                held += 1
                continue
            if status in COUNTED and not unreached:
                silent[status] += 1
                continue
            text = f"{status} in {failing[name]}" if failing[name] else str(status)
            runs = many(exercised[name], "run")
            if unreached:
                runs += f", not reached in {unreached}"
            table.add_row(
                name,
                _level(requirement),
                Text(text, style=STYLE.get(status, "")),
                runs,
            )
        parts = [f"{count} {verdict_name(name)}" for name, count in silent.items()]
        if held:
            parts.insert(0, f"{many(held, 'guarantee')} of the engine held")
        rest = ", ".join(parts)
        console.print()
        if table.row_count:
            console.print(table)
            console.print(f"[dim]{rest}[/]" if rest else "", end="\n" if rest else "")
        else:
            console.print(f"[bold]{area}[/]  [dim]{rest}[/]")


def _level(requirement: Requirement | None) -> str:
    """Return the level in words; a row without a requirement is about a process that died."""
    if requirement is None:
        return "MUST NOT"
    if requirement.kind == "guarantee":
        return f"{requirement.level} (engine)"
    return requirement.level


def verdict_name(verdict: str) -> str:
    """Return a verdict in words."""
    return verdict.lower().replace("_", " ")
