# SPDX-License-Identifier: Apache-2.0
"""The failures on the terminal: a line per root cause, and a section per failure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from kvconform.judge.records import CaseReport, Row
from kvconform.report.causes import (
    NO_VLLM,
    PROCESS_RULE,
    beyond,
    caveat,
    headline,
    other_runs,
    reproduction_words,
    usual_causes,
)
from kvconform.report.collector import Collector
from kvconform.report.layout import INDENT, command, paragraph, wrapped
from kvconform.report.roots import Root
from kvconform.report.timeline import fit, shorten
from kvconform.words import listed, many

LISTED = 4
"""Number of runs that a whole section lists by name."""
LEAST, MOST = 8, 24
"""Least and greatest number of lines for an excerpt without -v: it gets what the rest leaves."""
FEW = 2
"""Number of runs that a folded section lists by name."""
EXPLAINED = 5
"""Number of sections with a check and a usual cause, unless -v is given."""
THREADS = "lifecycle.threads-end"
"""The requirement on threads that a connector leaves."""
TIMING = (
    "The connector has threads or processes of its own: what they do may differ from run to run,"
    " and the command above may pass."
)
CONSEQUENCES = 4
"""Number of consequences of a root cause that are described."""
NAMED = 8
"""Number of consequences of a root cause that are named, unless -v is given."""
ADVICE = 3
"""Number of recommendations and risks that are named next to failures, unless -v is given."""
WISHED = 16
"""Number of lines of an excerpt for which the sentences about consequences are shortened."""


def print_failures(
    console: Console, collector: Collector, found: Sequence[Root], *, verbose: bool, room: int
) -> None:
    """Print a line per root cause, the whole section of the first one, and what others differ in.

    With `verbose`, all sections are whole. A consequence names its root cause. What is only a risk
    or a recommendation has no section otherwise, and next to failures only the first few of these
    have a line; they are the last of `found`. Without `verbose`, the first root cause takes at most
    `room` lines if its excerpt can be shortened so far.
    """
    if not found:
        return
    sections = [root for root in found if verbose or root.counts or root.row.kind == "guarantee"]
    named = None if verbose else NAMED
    console.print()
    with console.capture() as first:
        _overview(console, 1, found[0], place=not sections, most=named)
    shown = len(sections) + ADVICE
    if not sections or len(found) == shown + 1:
        shown = len(found)
    for number, root in enumerate(found[:shown], 1):
        _overview(console, number, root, place=number > len(sections), most=named)
    if len(found) > shown:
        text = f"and {len(found) - shown} more recommendations or risks (-v)"
        console.print(Text(text, style="bold"), soft_wrap=True)
    for number, root in enumerate(sections, 1):
        if number > 1 and not verbose:
            _folded(console, collector, root, number, brief=number > EXPLAINED)
            continue
        if not verbose:
            _fitted(console, collector, root, room - 1 - first.get().count("\n"))
            continue
        _whole(console, collector, root.group, number)
        for group in root.consequences:
            _whole(console, collector, group, None, root.row.requirement)


def _overview(console: Console, number: int, root: Root, *, place: bool, most: int | None) -> None:
    """Print the line of a root cause: what it is, and what follows from it, `most` by name.

    With `place`, print where it fails, too: it has no section.
    """
    first = root.row
    text = f"{first.requirement}: {headline(first)}."
    if number_of := root.number:
        failed = [name for name in root.failed if name != first.requirement]
        names = [*failed, *(f"{name} (blocked)" for name in root.blocked)]
        if most is not None and len(names) > most + 1:
            names = [*names[:most], f"and {len(names) - most} more"]
        text += f" {many(number_of, 'consequence')}: {', '.join(names)}"
    label = f"{number}. "
    if what := caveat(first):
        text += f" [{what}]"
    for line in wrapped(text, console.width, label, " " * len(label)):
        console.print(Text(line, style="bold"), soft_wrap=True)
    if place:
        more = len({row.run for row in root.group}) - 1
        where = f"{first.run}, and {many(more, 'more run')}" if more else first.run
        indent = " " * len(label)
        for line in wrapped(where, console.width, f"{indent}where: ", f"{indent}       "):
            console.print(Text(line), soft_wrap=True)


def _title(console: Console, row: Row, number: int | None, of: str | None) -> None:
    """Print the first line of a section."""
    label = f"{number}. {row.requirement}" if number is not None else row.requirement
    after = f", a consequence of {of}" if of is not None else ""
    rule = "─" * max(4, min(console.width, 100) - len(label) - len(after) - 4)
    console.print()
    console.print(f"[red]──[/] [bold red]{escape(label)}[/]{after} [red]{rule}[/]", soft_wrap=True)


def _fitted(console: Console, collector: Collector, root: Root, room: int) -> None:
    """Print the section of the first root cause in `room` lines, if that is possible.

    If the excerpt would get fewer than WISHED lines, each consequence is cut to one line.
    """
    left = 0
    for brief in (False, True):
        with console.capture() as rest:
            _whole(console, collector, root.group, 1, most=0)
            _consequences(console, root, brief=brief)
        left = room - rest.get().count("\n")
        if left >= WISHED:
            break
    _whole(console, collector, root.group, 1, most=min(max(left, LEAST), MOST))
    _consequences(console, root, brief=brief)


def _whole(
    console: Console,
    collector: Collector,
    group: Sequence[Row],
    number: int | None,
    of: str | None = None,
    *,
    most: int | None = None,
) -> None:
    """Print all that is known about one cause; `group` contains its rows.

    If `most` is given, the excerpt takes at most that many lines, and the reason for the rule is
    left out.
    """
    first = group[0]
    requirement = collector.spec.requirements.get(first.requirement)
    _title(console, first, number, of)
    rule = requirement.text if requirement is not None else PROCESS_RULE
    paragraph(console, "rule", rule, "bold")
    paragraph(console, "found", first.message)
    _where(console, first, _settings_of(collector, first))
    if requirement is not None:
        paragraph(console, "usual cause", usual_causes(first, requirement.wrong or ""))
    lines = _excerpt(collector.reports, first)
    if most is not None:
        lines = shorten(lines, console.width, most) if most else []
    if lines:
        console.print(Text("step  event", style="dim"))
    for text in lines:
        for line in fit([text], console.width):
            style = "bold" if text.startswith(">") else ""
            console.print(Text(line, style=style), soft_wrap=True)
    paragraph(console, "check", first.check)
    if requirement is not None and most is None:
        paragraph(console, "why", requirement.why)
    paragraph(console, "evidence", first.evidence)
    _also(console, group, LISTED if most is None else FEW)
    command(console, "reproduce", reproduction_words(collector, first))
    report = collector.reports.get(first.run)
    if first.requirement != THREADS and report is not None and report.works_aside:
        paragraph(console, "timing", TIMING)


def _folded(
    console: Console, collector: Collector, root: Root, number: int, *, brief: bool
) -> None:
    """Print what distinguishes a root cause from others: what was found, why, and where.

    With `brief`, leave out the check and the usual cause.
    """
    _title(console, root.row, number, None)
    paragraph(console, "found", root.row.message)
    requirement = collector.spec.requirements.get(root.row.requirement)
    if not brief and requirement is not None:
        _short(console, "check", root.row.check)
        _short(console, "usual cause", usual_causes(root.row, requirement.wrong or ""))
    _where(console, root.row)
    _also(console, root.group, FEW)
    _consequences(console, root)
    command(console, "reproduce", reproduction_words(collector, root.row))


def _short(console: Console, name: str, text: str | None, lines: int = 2) -> None:
    """Print at most so many lines of a text."""
    room = lines * (console.width - INDENT) - 10 * (lines - 1)  # lines end where words do
    cut = textwrap.shorten(text or "", room, placeholder=" ...", break_on_hyphens=False)
    paragraph(console, name, cut)


def _consequences(console: Console, root: Root, *, brief: bool = False) -> None:
    """Print a sentence per consequence of a root cause, in a line if `brief`; -v prints all.

    It names the case of one that does not fail in the same run.
    """
    runs = {row.run for row in root.group}
    texts = [
        f"{group[0].requirement}: {headline(group[0])}"
        + ("" if group[0].run in runs else f" ({group[0].case})")
        for group in root.consequences
    ]
    found = list(dict.fromkeys(texts))
    for number, text in enumerate(found[:CONSEQUENCES]):
        label = "" if number else "follows"
        if brief:
            _short(console, label, text, lines=1)
        else:
            paragraph(console, label, text)
    if len(found) > CONSEQUENCES:
        paragraph(console, "", f"and {len(found) - CONSEQUENCES} more (-v)")


def _where(console: Console, row: Row, settings: str = "") -> None:
    """Print the place of a failure, the settings of the run, and its situations."""
    where = [row.run]
    if row.step is not None:
        where.append(f"step {row.step}")
    if row.req:
        where.append(f"request {row.req}")
    paragraph(console, "where", ", ".join(where))
    paragraph(console, "", settings)
    for sentence in beyond(row):
        paragraph(console, "situation", sentence)


def _settings_of(collector: Collector, row: Row) -> str:
    """Return what the run's name says in brackets, in words; empty if its case is not known."""
    case = collector.spec.cases.get(row.case)
    if case is None:
        return ""
    known = case.variants([row.engine], [row.scheduling], [row.slow] if row.slow else None)
    return next((f"({each.words})" for each in known if each.id == row.run), "")


def _also(console: Console, group: Sequence[Row], most: int) -> None:
    """Print up to `most` of the other runs that fail for the same cause."""
    alike, risks = other_runs(group)
    paragraph(console, "also in", _listed(alike, "more run", most=most))
    paragraph(console, "also in", _listed(risks, "run", f" that {NO_VLLM}", most=most))


def _excerpt(reports: Mapping[str, CaseReport], row: Row) -> list[str]:
    report = reports.get(row.run)
    return [] if report is None else report.timelines.get(row.requirement, [])


def _listed(runs: Sequence[str], what: str, which: str = "", *, most: int) -> str:
    """Return the number of runs, and the first `most` of them; empty if there are none."""
    if not runs:
        return ""
    return f"{many(len(runs), what)}{which}: {listed(runs, most)}"
