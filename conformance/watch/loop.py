# SPDX-License-Identifier: Apache-2.0
"""`kvconform watch`: judge a connector again whenever its source changes.

Each judgement has two parts. A few of the runs that failed last time are repeated in one process,
which has the verdict on them in less than a second. Then everything is judged, beginning with what
failed and with what executes the changed lines; this writes the report. A change during either part
ends it, and begins the next judgement.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from kvconform.config.exists import check_connector_exists
from kvconform.config.selection import narrows
from kvconform.config.settings import Settings
from kvconform.errors import KvconformError, UsageError
from kvconform.files import scratch_root
from kvconform.process.scratch import temporary
from kvconform.process.watchdog import read_note
from kvconform.process.wire import Message
from kvconform.report import jsonl
from kvconform.session import crash
from kvconform.session.gateways import unfit
from kvconform.session.worker import START
from kvconform.watch import client, reach, sources
from kvconform.watch.results import Result
from kvconform.watch.screen import Failing, Screen

PEEKED = 4
"""Runs that failed last time that are repeated first, each for another requirement."""
ATTEMPTS = 3
T = TypeVar("T")


def with_server(
    path: Path, settings: Settings, note: Callable[[str], None], ask: Callable[[], T]
) -> T:
    """Return what `ask` returns, which needs the server at `path`; start or replace the server.

    `note` gets a sentence about each start.
    """
    for _ in range(ATTEMPTS):
        try:
            return ask()
        except client.Gone:
            note("starting the warm server: importing vLLM (6-10 s)")
        except client.Stale as stale:
            note(f"replacing the warm server: {stale} is not what it had imported")
        client.start(settings, path)
    return ask()


def once(settings: Settings, note: Callable[[str], None]) -> int:
    """Judge once through the warm server, and return the exit code of the run."""
    check(settings)
    check_connector_exists(
        settings.connector, settings.pythonpath, stand_ins=bool(settings.adapters)
    )
    path = client.path_for(settings)
    return with_server(path, settings, note, lambda: client.run(settings, path))


def check(settings: Settings) -> None:
    """Raise UsageError for settings with which forks of a process with vLLM cannot be used."""
    reason = unfit(settings)
    if reason is not None:
        raise UsageError(f"kvconform watch cannot be used {reason}; use kvconform run")


def watch(settings: Settings, console: Console) -> int:
    """Judge now and after each change, until Ctrl-C. Returns 0, the exit code."""
    if settings.trace is not None:
        raise UsageError("kvconform watch prints no timeline; use --once, or kvconform run")
    check(settings)
    watcher = Watcher(settings, Screen(console, settings.connector))
    try:
        with sources.Changes(watcher.source, settings.report_dir) as changes:
            watcher.judge("first judgement", changes)
            while True:
                select.select([changes], [], [])
                changes.take()
                watcher.judge("changed", changes)
    except KeyboardInterrupt:
        console.print("ended", highlight=False)
    return 0


class Watcher:
    """What is known about the connector between two judgements."""

    def __init__(self, settings: Settings, screen: Screen) -> None:
        self.source = sources.source_of(settings)
        self._settings = settings
        self._screen = screen
        self._path = client.path_for(settings)
        self._texts = sources.texts_of(self.source)
        self._results: dict[str, Result] = {}
        self._unknown: set[str] = set()  # runs whose lines may be others by now
        self._known: client.Known | None = None
        self._failing = self._failed_before()
        self._judged = False
        self._ending: list[socket.socket] = []

    def judge(self, why: str, changes: sources.Changes) -> None:
        """Judge the connector, and print what is new. Ends early when there are changes."""
        texts = sources.texts_of(self.source)
        before, self._texts = self._texts, texts
        changed = reach.changed_lines(before, texts)
        reached = reach.reaching(self._results.values(), changed)
        if changed:
            reach.move(self._results.values(), before, texts)
            self._unknown |= set(reached)
        names = ", ".join(names_of(before, texts))
        self._screen.begin(f"{why}: {names}" if names else why)
        try:
            self._peek(changes)
            self._judge_all(reached, changes)
        except client.Interrupted as interrupted:
            self._ending.append(interrupted.connection)
            self._screen.note("changed again")
            return
        except KvconformError as error:
            self._screen.error(error.message)
        self._screen.waiting(self.source.folder)

    def _peek(self, changes: sources.Changes) -> None:
        """Repeat some of the runs that failed last time."""
        seconds = {name: result.seconds for name, result in self._results.items()}
        wanted = peeked(self._failing, seconds)
        if not wanted:
            return
        answered: list[str] = []

        def listen(message: Message) -> None:
            result = Result(**message)
            answered.append(result.variant)
            self._screen.peeked(result.variant, result.failed)

        with temporary("peek", scratch_root()) as scratch:
            try:
                self._ask(
                    lambda: client.run(
                        self._settings,
                        self._path,
                        only=[run for run in wanted if run not in answered],
                        known=self._known,
                        scratch=scratch,
                        listener=listen,
                        until=changes,
                    )
                )
            except client.Died:
                note = read_note(scratch / "peek.note")
                run = (note.case if note is not None else None) or "a run"
                run = "the first, simplest run" if run == START else run
                self._screen.peeked(run, {crash.sentence(note): ""})

    def _judge_all(self, reached: Sequence[str], changes: sources.Changes) -> None:
        """Make all runs, those that failed or are reached first, and print what is new."""
        # Recording costs half of a run, and the lines of runs that no change reached are known.
        recorded = set(self._results) - self._unknown
        failed = list(dict.fromkeys(run for runs in self._failing.values() for run in runs))

        def listen(message: Message) -> None:
            result = Result(**message)
            name = result.variant
            if name in recorded:
                result.lines = self._results[name].lines
            self._results[name] = result
            self._unknown.discard(name)

        while self._ending:  # they still write to the directory of the report
            client.drain(self._ending.pop(), changes)
        self._ask(
            lambda: client.run(
                self._settings,
                self._path,
                first=list(dict.fromkeys([*failed, *reached])),
                traced=[str(self.source.folder)],
                untraced=sorted(recorded),
                listener=listen,
                until=changes,
            )
        )
        report = jsonl.read(self._settings.report_dir)
        before, self._failing = self._failing, self._noted(report)
        first = not self._judged
        self._judged = True
        self._screen.judged(
            report,
            None if first else before,
            self._failing,
            self._settings.report_dir,
            part=narrows(self._settings) or bool(self._settings.cases),
        )

    def _ask(self, ask: Callable[[], int]) -> int:
        return with_server(self._path, self._settings, self._screen.note, ask)

    def _failed_before(self) -> Failing:
        """Return what failed in the report that is there, if it is about the same connector."""
        try:
            report = jsonl.read(self._settings.report_dir)
        except UsageError:
            return {}
        return self._noted(report) if report.header.connector == self._settings.connector else {}

    def _noted(self, report: jsonl.Report) -> Failing:
        """Return what failed in a report, and remember the connector's capabilities."""
        header = report.header
        if header.capabilities:
            self._known = header.capabilities, header.capability_sources
        return failing(report)


def failing(report: jsonl.Report) -> Failing:
    """Return the failures of a report that make the connector nonconformant."""
    found: dict[str, dict[str, str]] = {}
    for requirement, run in sorted(report.against):
        row = report.rows[requirement, run]
        found.setdefault(requirement, {})[run] = row.finding
    return found


def peeked(failures: Failing, seconds: Mapping[str, float]) -> list[str]:
    """Return the runs to repeat first: the shortest one per requirement, each run once."""
    found: list[str] = []
    for runs in failures.values():
        if not any(run in found for run in runs):
            found.append(min(runs, key=lambda run: seconds.get(run, 0.0)))
    return found[:PEEKED]


def names_of(before: reach.Texts, after: reach.Texts) -> list[str]:
    """Return the names of the files that are others in `after`."""
    return sorted(
        {Path(file).name for file in {*before, *after} if before.get(file) != after.get(file)}
    )
