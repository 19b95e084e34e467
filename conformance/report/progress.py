# SPDX-License-Identifier: Apache-2.0
"""The progress display during a run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from kvconform.judge.records import Row, Verdict
from kvconform.report.layout import is_watched
from kvconform.words import many

EVERY = 60.0
"""Seconds between two lines of progress where there is no terminal."""
ENOUGH = 10.0
"""Seconds from the first result on after which the time that is left is estimated."""


class Progress:
    """Progress display: a bar on a terminal, elsewhere a line every EVERY seconds.

    Prints nothing before `start` and after `stop`.
    """

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self.total = total
        self.count = 0
        self.failing: set[str] = set()
        self._bar: Bar | None = None
        self._last = time.monotonic()
        self._begun: float | None = None

    def start(self) -> None:
        """Show the bar on a terminal."""
        if is_watched(self.console):
            now = TextColumn("{task.fields[now]}")
            self._bar = Bar(
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                now,
                console=self.console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(
                "running", total=self.total, now="importing vLLM (6-10 s)"
            )

    def _begin(self, refused: str | None) -> None:
        """Say, at the first result, what comes: all runs, or why there will be none."""
        self._begun = time.monotonic()
        if refused is not None:
            self.console.print(refused, highlight=False, markup=False)
        elif self._bar is None:
            self.console.print(f"running {many(self.total, 'run')} ...", highlight=False)

    def done(self, variant: str, rows: Sequence[Row], refused: str | None = None) -> None:
        """Count the run of a variant as done, and its failures.

        `refused` says why the run was not made, if vLLM does not construct the class.
        """
        if self._begun is None:
            self._begin(refused)
        self.count += 1
        self.failing |= {
            row.requirement for row in rows if row.verdict is Verdict.FAIL and row.gating
        }
        if self._bar is not None:
            case = variant.partition("[")[0]
            parts = [*self._left(), self._failures(), case]
            self._bar.update(self._task, completed=self.count, now=" · ".join(parts))
        elif time.monotonic() - self._last > EVERY:
            self._last = time.monotonic()
            parts = [
                f"{self.count} of {self.total} runs made",
                f"{self._failures()} so far",
                *self._left(),
            ]
            self.console.print(", ".join(parts), highlight=False)

    def _left(self) -> list[str]:
        """Return roughly how much time is left, in words; nothing while too little is known."""
        if self._begun is None or self.count == self.total:
            return []
        passed = time.monotonic() - self._begun
        if passed < ENOUGH:
            return []
        seconds = passed / self.count * (self.total - self.count)
        if seconds < 60:
            return ["less than a minute left"]
        return [f"about {many(math.ceil(seconds / 60), 'minute')} left"]

    def _failures(self) -> str:
        number = len(self.failing)
        if number == 0:
            return "no failures"
        return "1 requirement fails" if number == 1 else f"{number} requirements fail"

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
