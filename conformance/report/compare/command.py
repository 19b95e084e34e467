# SPDX-License-Identifier: Apache-2.0
"""`kvconform compare`: what flipped between two reports, or from the first to each of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.report.compare import pages
from kvconform.report.compare.changes import Comparison, compare
from kvconform.report.compare.reports import read

STYLE = {
    "fails now": "bold red",
    "fails otherwise": "red",
    "is cut short": "red",
    "holds unexpectedly": "red",
    "has no answer": "yellow",
    "is expected to fail": "yellow",
    "holds now": "green",
}
NAMED = 3


def command(
    reports: Annotated[
        list[str],
        typer.Argument(
            metavar="OLD NEW...",
            help="report.jsonl, or the directory that has it",
            show_default=False,
        ),
    ],
    markdown: Annotated[
        str | None,
        typer.Option("--markdown", metavar="FILE", help="write it as Markdown", show_default=False),
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(
            "--html", metavar="FILE", help="write it as one HTML file", show_default=False
        ),
    ] = None,
) -> None:
    """What flipped from the first report to each of the others. Ends with 1 if something counts against the connector that did not, with 3
    if a later one has no answer. Needs no vLLM."""
    from kvconform.report.terminal import make_console

    if len(reports) < 2:
        raise UsageError("name two reports, or more: kvconform compare OLD NEW")
    first, *others = [read(place) for place in reports]
    found = [compare(first, other) for other in others]
    console = make_console()
    for comparison in found:
        show(console, comparison)
    for place, text in ((markdown, pages.markdown), (html, pages.html)):
        if place is not None:
            try:
                Path(place).write_text(text(found), encoding="utf-8")
            except OSError as error:
                raise EnvironmentProblem(
                    f"{place} cannot be written: {error.strerror or error}"
                ) from None
    raise typer.Exit(
        1
        if any(comparison.worse for comparison in found)
        else 3
        if any(other.silent for other in others)
        else 0
    )


def show(console: Console, comparison: Comparison) -> None:
    """One comparison on the terminal."""
    old, new = comparison.old, comparison.new
    console.print(
        f"[bold]{escape(old.name)}[/] ({escape(str(old.path))})\n  → [bold]{escape(new.name)}[/] ({escape(str(new.path))})"
    )
    for report, what in (
        (old, "a failure in what it lacks counts as one that it did not have"),
        (new, "what it lacks is not compared"),
    ):
        if not report.complete:
            console.print(f"[yellow]warning[/]     {escape(str(report.path))} was cut off: {what}")
    console.print(f"answer      {old.word} → {new.word}")
    for name, was, now in comparison.settings:
        console.print(f"differs     {escape(name)}: {escape(was)} → {escape(now)}")
    for words, runs in (("only before", comparison.only_old), ("only now", comparison.only_new)):
        if runs:
            console.print(
                f"{words:<11} {len(runs)} run{'' if len(runs) == 1 else 's'}, first {escape(runs[0])}"
            )
    if not comparison.flips:
        console.print("no requirement says anything else")
    for flip in comparison.flips:
        style = STYLE.get(flip.kind, "dim") if flip.counts else "dim"
        whose = "" if flip.counts else " (does not count)"
        low = (flip.was.lower().replace("_", " "), flip.now.lower().replace("_", " "))
        console.print(
            f"[{style}]{flip.kind}[/]{whose}  [bold]{escape(flip.requirement)}[/]  {low[0]} → {low[1]} in {len(flip.runs)} runs"
        )
        if flip.message and flip.kind in STYLE:
            console.print(f"    {escape(pages.told(flip.message))}", style="dim")
        if flip.kind in STYLE:
            more = f" and {len(flip.runs) - NAMED} more" if len(flip.runs) > NAMED else ""
            console.print(f"    {escape(', '.join(flip.runs[:NAMED]))}{more}", style="dim")
    console.print()
