# SPDX-License-Identifier: Apache-2.0
"""What `kvconform watch` prints: one screen per judgement, with what it changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from kvconform.report.jsonl import Report
from kvconform.report.layout import wrapped

Failing = Mapping[str, Mapping[str, str]]
"""Requirement -> run -> what was found."""
MOST = 8
"""Requirements of a kind that one screen lists."""


class Screen:
    """Prints on a console. On a terminal, each judgement begins on an empty screen."""

    def __init__(self, console: Console, connector: str) -> None:
        self._console = console
        self._connector = connector

    def begin(self, why: str) -> None:
        """Start the screen of a judgement."""
        if self._console.is_terminal:
            self._console.clear()
        now = datetime.now().strftime("%H:%M:%S")
        self._print(f"[bold]{escape(self._connector)}[/]  {now}  {escape(why)}")

    def peeked(self, run: str, failed: Mapping[str, str]) -> None:
        """Print the verdict of a run that failed last time."""
        if failed:
            self._print(f"[bold red]fails[/]         {escape(run)}: {escape(', '.join(failed))}")
        else:
            self._print(f"[green]passes now[/]    {escape(run)}")

    def note(self, sentence: str) -> None:
        """Print a sentence about the watching itself."""
        self._print(f"[dim]{escape(sentence)}[/]")

    def error(self, sentence: str) -> None:
        """Print why the connector could not be judged."""
        self._print(f"[bold red]not judged[/]    {escape(sentence)}")

    def judged(
        self, report: Report, before: Failing | None, now: Failing, folder: str, *, part: bool
    ) -> None:
        """Print the verdict, and what fails now that did not, and the other way round.

        `before`: what failed last time; None the first time. `part`: not all was judged.
        """
        if before is None:
            self._list("[bold red]fails[/]        ", now, sorted(now))
        else:
            self._list("[bold red]newly fails[/]  ", now, sorted(set(now) - set(before)))
            self._list("[green]newly passes[/] ", {}, sorted(set(before) - set(now)))
            self._list("still fails  ", now, sorted(set(now) & set(before)))
            if {key: set(runs) for key, runs in before.items()} == {
                key: set(runs) for key, runs in now.items()
            }:
                self._print("nothing else changed")
        style = "bold red" if now else "bold green"
        word = report.word + (" in what was selected" if part else "")
        self._print(f"[{style}]{escape(word)}[/]  the whole report: {escape(str(folder))}")

    def waiting(self, folder: Path) -> None:
        """Print that the next change is waited for."""
        self._print(f"[dim]watching {escape(str(folder))}; Ctrl-C ends[/]")

    def _list(self, title: str, failing: Failing, names: Sequence[str]) -> None:
        for name in names[:MOST]:
            runs = failing.get(name, {})
            line = f"{title} {escape(name)}"
            first = next(iter(runs), "")
            if runs:
                where = f"{len(runs)} runs, first {first}" if len(runs) > 1 else first
                line += f"  [dim]{escape(where)}[/]"
            self._print(line)
            if runs.get(first):
                for part in wrapped(runs[first], self._console.width, "    ", "    "):
                    self._print(escape(part))
        if len(names) > MOST:
            self._print(f"{title} {len(names) - MOST} more")

    def _print(self, markup: str) -> None:
        self._console.print(markup, highlight=False, soft_wrap=True)
