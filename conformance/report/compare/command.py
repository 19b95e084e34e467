# SPDX-License-Identifier: Apache-2.0
"""`kvconform compare`: changes between two reports, or from the first to each of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.report.compare import changes
from kvconform.report.compare.changes import Comparison, compare
from kvconform.report.jsonl import read

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
    """Print one comparison."""
    old = comparison.old
    new = comparison.new
    console.print(f"[bold]{escape(old.name)}[/] ({escape(str(old.path))})")
    console.print(f"  → [bold]{escape(new.name)}[/] ({escape(str(new.path))})")
    for report, what in (
        (old, "failures of runs that it lacks count as new"),
        (new, "runs that it lacks are not compared"),
    ):
        if not report.complete:
            console.print(f"[yellow]warning[/]     {escape(str(report.path))} was cut off: {what}")
    console.print(f"verdict     {old.word} → {new.word}")
    for name, was, now in comparison.settings:
        console.print(f"differs     {escape(name)}: {escape(was)} → {escape(now)}")
    for words, runs in (("only before", comparison.only_old), ("only now", comparison.only_new)):
        if runs:
            number = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
            console.print(f"{words:<11} {number}, first {escape(runs[0])}")
    if not comparison.flips:
        console.print("no verdict changed")
    for flip in comparison.flips:
        style = STYLE.get(flip.kind, "dim") if flip.counts else "dim"
        excused = "" if flip.counts else " (does not count)"
        change = f"{flip.was} → {flip.now}".lower().replace("_", " ")
        console.print(
            f"[{style}]{flip.kind}[/]{excused}  [bold]{escape(flip.requirement)}[/]"
            f"  {change} in {len(flip.runs)} runs"
        )
        if flip.message and flip.kind in STYLE:
            console.print(f"    {escape(' '.join(flip.message.split()))}", style="dim")
        if flip.kind in STYLE:
            more = f" and {len(flip.runs) - NAMED} more" if len(flip.runs) > NAMED else ""
            console.print(f"    {escape(', '.join(flip.runs[:NAMED]))}{more}", style="dim")
    console.print()
