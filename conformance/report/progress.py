# SPDX-License-Identifier: Apache-2.0
"""Progress while the run goes on: a line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from kvconform.verdict import Row, Verdict

EVERY = 15.0


class Progress:
    """`done` counts one run. Quiet before `start` and after `stop`."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.count = console, total, 0
        self.failing: set[str] = set()
        self._bar: Bar | None = None
        self._last = time.monotonic()

    def start(self) -> None:
        if self.console.is_terminal:
            now = TextColumn("{task.fields[now]}")
            self._bar = Bar(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), now, console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("running", total=self.total, now="importing vLLM (6-10 s)")
        else:
            self.console.print(f"running {self.total} run{'s' if self.total > 1 else ''} ...", highlight=False)

    def done(self, variant: str, rows: Sequence[Row]) -> None:
        self.count += 1
        self.failing |= {row.requirement for row in rows if row.verdict is Verdict.FAIL and row.gating}
        number = len(self.failing)
        bad = "no failures" if not number else "1 requirement fails" if number == 1 else f"{number} requirements fail"
        if self._bar is not None:
            self._bar.update(self._task, completed=self.count, now=f"{bad} · {variant.partition('[')[0]}")
        elif time.monotonic() - self._last > EVERY:
            self._last = time.monotonic()
            self.console.print(f"{self.count}/{self.total} runs, {bad}", highlight=False)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
