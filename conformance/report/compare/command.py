# SPDX-License-Identifier: Apache-2.0
"""`kvconform compare`: changes between two reports, or from the first to each of several."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.report.compare import changes
from kvconform.report.compare.changes import Comparison, compare
from kvconform.report.jsonl import read
from kvconform.report.layout import wrapped
from kvconform.words import listed, many

STYLE = {
    "fails now": "bold red",
    "fails differently": "red",
    "is cut short": "red",
    "holds unexpectedly": "red",
    "has no verdict": "yellow",
    "is expected to fail": "yellow",
    "holds now": "green",
}
"""Style per kind of change. The messages and runs of other kinds are not listed."""
NAMED = 3
"""Number of runs of a change that are named."""


def command(
    reports: Annotated[
        list[str],
        typer.Argument(
            metavar="OLD NEW...",
            help="report.jsonl, or its directory",
            show_default=False,
        ),
    ],
    markdown: Annotated[
        str | None,
        typer.Option(
            "--markdown",
            metavar="FILE",
            help="also write the comparison as Markdown",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="also write the comparison as one HTML file",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what changed from the first report to each of the others. Needs no vLLM.

    Exits with 1 if a failure counts against the connector that did not before, and with 3 if a
    later report has no verdict.
    """
    from kvconform.report.terminal import make_console

    if len(reports) < 2:
        raise UsageError("name at least two reports: kvconform compare OLD NEW")
    first, *others = [read(place) for place in reports]
    found = [compare(first, other) for other in others]
    console = make_console()
    for comparison in found:
        show(console, comparison)
    for place, text in ((markdown, changes.markdown), (html, changes.html)):
        if place is not None:
            try:
                Path(place).write_text(text(found), encoding="utf-8")
            except OSError as error:
                raise EnvironmentProblem(
                    f"{place} cannot be written: {error.strerror or error}"
                ) from None
    if any(comparison.worse for comparison in found):
        raise typer.Exit(1)
    raise typer.Exit(3 if any(other.silent for other in others) else 0)


def show(console: Console, comparison: Comparison) -> None:
    """Print one comparison. Its lines are not wrapped, so that no path or id is broken."""
    say = functools.partial(console.print, soft_wrap=True)
    old = comparison.old
    new = comparison.new
    say(f"[bold]{escape(old.name)}[/] ({escape(str(old.path))})")
    say(f"  → [bold]{escape(new.name)}[/] ({escape(str(new.path))})")
    for report, what in (
        (old, "failures of runs that it lacks count as new"),
        (new, "runs that it lacks are not compared"),
    ):
        if not report.complete:
            say(f"[yellow]warning[/]     {escape(str(report.path))} was cut off: {what}")
    say(f"verdict     {old.word} → {new.word}")
    for name, was, now in comparison.settings:
        say(f"differs     {escape(name)}: {escape(was)} → {escape(now)}")
    for words, runs in (("only before", comparison.only_old), ("only now", comparison.only_new)):
        if runs:
            say(f"{words:<11} {many(len(runs), 'run')}, first {escape(runs[0])}")
    if not comparison.flips:
        say("no requirement has another verdict")
    for flip in comparison.flips:
        style = STYLE.get(flip.kind, "dim") if flip.counts else "dim"
        excused = "" if flip.counts else " (does not count)"
        change = f"{flip.was} → {flip.now}".lower().replace("_", " ")
        say(
            f"[{style}]{flip.kind}[/]{excused}  [bold]{escape(flip.requirement)}[/]"
            f"  {change} in {many(len(flip.runs), 'run')}"
        )
        if flip.message and flip.kind in STYLE:
            for line in wrapped(flip.message, console.width, "    ", "    "):
                say(escape(line), style="dim")
        if flip.kind in STYLE:
            say(f"    {escape(listed(flip.runs, NAMED))}", style="dim")
    say()
